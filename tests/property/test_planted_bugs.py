"""Bugs planted into the operator one at a time: the search for broken promises finds each of them."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from finetune_api.v1alpha1 import FineTuneJob
from finetune_operator import case, controller, decide, ending, failure, restarts
from finetune_operator import reconcile as shell
from finetune_operator.case import Case, Decision
from finetune_operator.cluster import KubernetesCluster
from finetune_operator.observe import NodeObservation
from finetune_operator.reconcile import Outcome, Pass, Seen
from support.simulator.checks import check_history, check_undisturbed
from support.simulator.history import Scenario
from support.simulator.scenarios import failing_nodes, operator_troubles, scenarios, stale_caches

EXAMPLES = 600
Raw = dict[str, Any]
Plant = Callable[[pytest.MonkeyPatch], None]


def never_ask_for_a_fresh_list(patch: pytest.MonkeyPatch) -> None:
    """The cache is believed when it shows no pod."""
    patch.setattr(decide, "confirmed", lambda c, made: made)
    patch.setattr(ending, "confirmed", lambda c, made: made)


def take_absence_from_the_cache_for_loss(patch: pytest.MonkeyPatch) -> None:
    """A pod that a stale cache does not show counts as lost."""
    patch.setattr(decide, "confirmed", lambda c, made: case.confirmed(c, made) if made.actions else made)


def act_before_the_status_is_written(patch: pytest.MonkeyPatch) -> None:
    """The two steps of a pass in the wrong order."""

    async def reconcile(run: Pass, job: Raw, seen: Seen) -> Outcome:
        parsed = FineTuneJob.parse(job)
        observation = shell._observe(parsed, seen)
        if parsed.status.attempts:
            observation = await shell._look_closely(run, parsed, observation, seen)
        decision = decide.decide(parsed, observation, run.now(), run.settings)
        refusals = await shell._perform(run, parsed.metadata, decision.actions)
        following = FineTuneJob.parse({**job, "status": shell.render_status(decision.status)})
        ahead = decide.decide(following, replace(observation, fresh=True), run.now(), run.settings)
        await shell._perform(run, following.metadata, ahead.actions)
        if decision.status != parsed.status:
            job = await run.cluster.write_status(job, shell.render_status(decision.status))
        return Outcome(job, decision.requeue_after, refusals)

    patch.setattr(controller, "reconcile", reconcile)


def begin_while_older_pods_may_run(patch: pytest.MonkeyPatch) -> None:
    """Nobody waits for the pods of the last attempt."""
    patch.setattr(NodeObservation, "may_run", lambda node, now: False)


def forget_what_was_spent(patch: pytest.MonkeyPatch) -> None:
    """Restarts are not counted."""

    def plan_restart(verdict: Any, ended: Any, earlier: Any, counts: Any, job: Any) -> restarts.Restart:
        return replace(restarts.plan_restart(verdict, ended, earlier, counts, job), counts=counts)

    patch.setattr(ending, "plan_restart", plan_restart)


def restart_after_success(patch: pytest.MonkeyPatch) -> None:
    """Exit 0 with a result counts as an end like any other."""
    patch.setattr(NodeObservation, "succeeded", property(lambda node: False))
    patch.setattr(failure, "_well", lambda evidence: False)


def report_suspended_too_early(patch: pytest.MonkeyPatch) -> None:
    """A pod that was asked to stop counts as stopped."""

    def running_pods(self: Case) -> list[NodeObservation]:
        return [node for node in self.seen.live() if node.may_run(self.now) and not node.deleting]

    patch.setattr(Case, "running_pods", running_pods)


def overwrite_a_newer_status(patch: pytest.MonkeyPatch) -> None:
    """The status is written whatever the job's version is by now."""
    write = KubernetesCluster.write_status

    async def write_status(self: KubernetesCluster, job: Raw, status: Raw) -> Raw:
        return await write(self, {**job, "metadata": {**job["metadata"], "resourceVersion": ""}}, status)

    patch.setattr(KubernetesCluster, "write_status", write_status)


def judge_on_the_first_evidence(patch: pytest.MonkeyPatch) -> None:
    """The first node that is seen to end is taken for the cause."""

    def stop(c: Case) -> Decision:
        return ending._judge(c, c.record) if c.record.reason in ("NodeFailed", "NodeDeleted") else ending_stop(c)

    ending_stop = ending.stop
    patch.setattr(decide, "stop", stop)


def go_on_after_the_end(patch: pytest.MonkeyPatch) -> None:
    """A job that is suspended after its end is stopped once more."""
    real = decide._after_the_end

    def after_the_end(c: Case) -> Decision:
        return ending.begin_to_stop(c, ending.StopReason.SUSPENDED) if c.job.spec.suspend else real(c)

    patch.setattr(decide, "_after_the_end", after_the_end)


ANYTHING = (scenarios(), check_history)
TAKEOVERS = (scenarios(takeovers=True), check_history)
STALE_CACHES = (stale_caches(), check_history)
FAILING_NODES = (failing_nodes(), check_history)
OPERATOR_ONLY = (operator_troubles(), check_undisturbed)

PLANTED = (
    (never_ask_for_a_fresh_list, STALE_CACHES),
    (take_absence_from_the_cache_for_loss, OPERATOR_ONLY),
    (act_before_the_status_is_written, ANYTHING),
    (begin_while_older_pods_may_run, ANYTHING),
    (forget_what_was_spent, ANYTHING),
    (restart_after_success, OPERATOR_ONLY),
    (report_suspended_too_early, ANYTHING),
    (overwrite_a_newer_status, TAKEOVERS),
    (judge_on_the_first_evidence, FAILING_NODES),
    (go_on_after_the_end, ANYTHING),
)


@pytest.mark.parametrize(("plant", "search"), PLANTED, ids=[plant.__name__ for plant, _ in PLANTED])
def test_a_planted_bug_is_found(plant: Plant, search: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    histories, check = search

    @settings(
        max_examples=EXAMPLES,
        phases=(Phase.generate,),
        database=None,
        deadline=None,
        derandomize=True,
        suppress_health_check=tuple(HealthCheck),
    )
    @given(histories, st.data())
    def search_for_it(scenario: Scenario, data: st.DataObject) -> None:
        check(scenario, data)

    with pytest.raises(AssertionError):
        search_for_it()
