"""Plants an unexpected error at every await of every background loop: it costs one object one round.

An error in a function that a loop calls is raised at the await of the loop, so that errors are planted only in the
modules of the loops.
"""

import ast
import inspect
import logging
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import pairwise

import pytest

from finetune_operator.controller import controller, orphans, progress_poller
from finetune_operator.controller.controller import LeaseLost
from finetune_operator.kube import informer
from finetune_operator.kube.resource_versions import StateRolledBack
from finetune_operator.manager import health, leader_election, manager
from finetune_operator.notifications import notifier
from finetune_operator.tasks import error_net, workqueue
from finetune_operator.tasks.error_net import LOG_INTERVAL_SECONDS
from testing.fakes.manager_world import JOBS, METRICS, run_manager
from testing.fakes.planted_errors import PlantedError, Planter, list_places
from testing.fakes.virtual_time import run_in_virtual_time

LOOPS = {  # each task of the manager, and the module of its loop
    "keep_running('event loop', self._loop_lag.run)": health,
    "keep_running(f'watch of {informer.path}', informer.run)": informer,
    "self._watch_kopf()": manager,  # its end ends the process
    "keep_running('pruning of tombstones', self._controller.prune_tombstones)": controller,
    "keep_running('resync', self._resync_periodically)": manager,
    "worker": workqueue,
    "keep_running('polls', self._controller.progress_poller.run)": progress_poller,
    "keep_running('sweeps', self._controller.orphan_sweeper.run)": orphans,
    "keep_running('notifications', self._notifier.run)": notifier,
}
MODULES = (*dict.fromkeys(LOOPS.values()), error_net, leader_election)
NO_LOOP = re.compile(  # the start and the end of the process, requests, and the end of kopf's watch
    r"manager\.(run_operator|_run_until_stopped|Manager\.(run|_run_as_leader|_start_kopf|_watch_kopf|shut_down"
    r"|stop_kopf)):|health\.(start_http_server|LastRequestTime)|leader_election\.LeaderElection\.(_write_)?release:"
)
PLACES = tuple(place for module in MODULES for place in list_places(module) if not NO_LOOP.match(place))
IN_PASS = re.compile(r"controller\.Controller\.(_run_pass: await self\._reconcile\(|_reconcile)")
OF_ONE_OBJECT = re.compile(
    r"orphans\.\w+\._(try|read|del|rel)|notifier\.\w+\._(send_first|deliver)|.*(\.poll:|self\._run_pass)"
)
AFTER_ERRORS = (
    "error_net.ErrorNet.keep_running: await asyncio.sleep",
    "informer.Informer.run: await asyncio.sleep(self",
)
EARLIER_ERRORS = ("unexpected lag", "unexpected event")
DURATION_SECONDS = 240.0


@pytest.fixture(scope="module")
def planter() -> Iterator[Planter]:
    planter = Planter()
    with pytest.MonkeyPatch.context() as patch:
        for module in MODULES:
            planter.plant(module, patch)
        yield planter


@pytest.fixture(scope="module")
def recurring_steps(planter: Planter) -> set[str]:
    """Return the steps that the loops repeat, after a check that all places are executed."""
    planter.arm("")
    with pytest.MonkeyPatch.context() as patch:
        world, is_running = run_in_virtual_time(run_manager(patch, seconds=DURATION_SECONDS, failures=EARLIER_ERRORS))

    assert is_running
    assert set(PLACES) - planter.executed == set()
    return {step for step, last_at in world.steps.items() if last_at > DURATION_SECONDS / 2}


def count_loop_errors() -> float:
    return sum(each.value for each in next(iter(METRICS.loop_errors.collect())).samples if each.name.endswith("_total"))


def find_planted(records: Iterable[logging.LogRecord]) -> list[logging.LogRecord]:
    return [each for each in records if each.exc_info and PlantedError.__name__ in repr(each.exc_info[1])]


def test_every_task_of_the_manager_is_a_known_loop() -> None:
    calls = [node for node in ast.walk(ast.parse(inspect.getsource(manager))) if isinstance(node, ast.Call)]
    tasks = [ast.unparse(call.args[0]) for call in calls if ast.unparse(call.func) == "group.create_task"]

    assert sorted(tasks) == sorted(LOOPS)
    assert len(PLACES) > 50


@pytest.mark.parametrize("place", PLACES, ids=[place[:99] for place in PLACES])  # pytest numbers longer ids
def test_an_unexpected_error_at_an_await_costs_one_object_one_round(
    place: str,
    planter: Planter,
    recurring_steps: set[str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    earlier_errors = EARLIER_ERRORS if place.startswith(AFTER_ERRORS) else ()
    planter.arm(place, times=2)
    errors_before = count_loop_errors()

    world, is_running = run_in_virtual_time(run_manager(monkeypatch, seconds=DURATION_SECONDS, failures=earlier_errors))

    raised_at, records = planter.raised_at, find_planted(caplog.records)
    assert is_running
    assert raised_at
    assert [step for step in recurring_steps if world.steps[step] <= raised_at[-1]] == []
    if IN_PASS.match(place):  # the metric of passes counts these errors
        assert records
        assert all(vars(record)["job"].endswith(JOBS) for record in records)
        return
    assert count_loop_errors() - errors_before > len(earlier_errors)
    logged = Counter(record.getMessage() for record in records)
    assert max(logged.values(), default=0) <= 1 + sum(b - a >= LOG_INTERVAL_SECONDS for a, b in pairwise(raised_at))
    assert records or earlier_errors
    assert not OF_ONE_OBJECT.match(place) or all(vars(record)["object"] for record in records)


@pytest.mark.parametrize(
    "error",
    [LeaseLost("x"), StateRolledBack("x", known_version="2", current_version="1")],
    ids=lambda e: type(e).__name__,
)
def test_an_exception_by_design_ends_the_manager(
    error: Exception, planter: Planter, monkeypatch: pytest.MonkeyPatch
) -> None:
    (place,) = (place for place in PLACES if place.startswith("controller.Controller.resync_jobs"))
    planter.arm(place, times=1, error=error)

    _, is_running = run_in_virtual_time(run_manager(monkeypatch, seconds=DURATION_SECONDS))

    assert not is_running
