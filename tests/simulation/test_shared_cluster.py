"""Tests of the parts of the simulator that several jobs share: pauses of processes, and releases of the operator."""

import asyncio
from contextvars import copy_context

import pytest

from testing.fakes.virtual_time import run_in_virtual_time
from testing.simulator.history import JobScenario, Liveness, Scenario, run_history
from testing.simulator.scenarios import SCENARIO_KINDS, SHARED_CLUSTER_KINDS
from testing.simulator.world.choices import SeededChoices
from testing.simulator.world.process_pause import ProcessPause, create_pausable_task, current_process
from testing.simulator.world.releases import THIS_RELEASE, load_next_release
from testing.simulator.world.world import JOB


async def record_steps_around_a_pause(*, cancelled: bool) -> list[float]:
    """Return the times at which a process that sleeps one second runs; it is paused from 2.5 s to 10 s."""
    loop, process, times = asyncio.get_running_loop(), ProcessPause(), []
    loop.set_task_factory(create_pausable_task)

    async def run() -> None:
        try:
            while True:
                await asyncio.sleep(1.0)
                times.append(loop.time())
        finally:
            times.append(-loop.time())

    context = copy_context()
    context.run(current_process.set, process)
    task = loop.create_task(run(), context=context)
    loop.call_later(2.5, process.pause)
    loop.call_later(5.0, task.cancel if cancelled else process.pause)
    loop.call_later(10.0, process.resume)
    await asyncio.sleep(11.5)
    return times


def test_a_paused_process_continues_after_the_pause() -> None:
    assert run_in_virtual_time(record_steps_around_a_pause(cancelled=False))[:4] == [1.0, 2.0, 10.0, 11.0]


def test_a_cancellation_during_a_pause_takes_effect_after_it() -> None:
    assert run_in_virtual_time(record_steps_around_a_pause(cancelled=True)) == [1.0, 2.0, -10.0]


def test_the_next_release_is_imported_beside_this_one() -> None:
    release = load_next_release()

    assert release.start is not THIS_RELEASE.start
    assert release.version != THIS_RELEASE.version
    assert load_next_release() is release


def test_jobs_of_one_name_in_two_namespaces_complete_without_faults() -> None:
    other_job = JobScenario(JOB._replace(namespace="tenant"), liveness=Liveness.COMPLETES_UNDISTURBED)
    history = run_history(
        Scenario(further_jobs=(other_job,), liveness=Liveness.COMPLETES_UNDISTURBED), SeededChoices(0)
    )

    assert (history.violations, history.phase, history.restarts) == ([], "Complete", 0)


@pytest.mark.parametrize("kind", [draw.__name__ for draw in SHARED_CLUSTER_KINDS])
def test_equal_seeds_give_equal_histories_of_several_jobs(kind: str) -> None:
    all_choices = [SeededChoices(3) for _ in range(2)]
    first, second = (run_history(SCENARIO_KINDS[kind](choices), choices).trace for choices in all_choices)

    assert first == second
