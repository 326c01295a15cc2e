"""Test how the status shows what slows a job down."""

from dataclasses import replace

from finetune_api.v1alpha1.repair import Repair
from finetune_api.v1alpha1.status import MAX_DEGRADATIONS, AttemptRecord, AttemptState, JobStatus
from finetune_operator.core.actions import EmitEvent
from finetune_operator.core.degradations import derive_degradations
from finetune_supervisor.messages import Degradation
from testing.builders.jobs import build_observation, decide_once, decide_with, job
from testing.builders.passes import running_pods

SOCKETS = Degradation("NetworkSockets", "NCCL uses sockets")
IDLE = Degradation("IdleGpus", "2 of 4 GPUs are idle")


def build_status(state: AttemptState = AttemptState.RUNNING, **fields: object) -> JobStatus:
    return JobStatus(attempts=(AttemptRecord(attempt=0, state=state),), **fields)


def test_report_of_the_trainer_is_sorted_by_reason() -> None:
    assert derive_degradations(build_status(), (SOCKETS, IDLE)) == (IDLE, SOCKETS)


def test_recorded_degradations_are_kept_until_the_attempt_is_polled() -> None:
    status = build_status(degraded=(SOCKETS,))

    assert derive_degradations(status, None) == (SOCKETS,)
    assert derive_degradations(status, ()) == ()


def test_starting_attempt_has_none() -> None:
    status = build_status(AttemptState.STARTING, degraded=(SOCKETS,))

    assert derive_degradations(status, (IDLE,)) == ()


def test_repair_that_offloads_is_a_degradation() -> None:
    (degradation,) = derive_degradations(build_status(repair=Repair(deepspeed="zero3_offload")), ())

    assert degradation.reason == "CpuOffload"
    assert "zero3_offload" in degradation.message
    assert derive_degradations(build_status(repair=Repair(deepspeed="zero3")), ()) == ()


def test_forged_report_is_bounded() -> None:
    many = tuple(Degradation(f"Reason{number}") for number in range(100))
    forged = (Degradation("no reason"), Degradation(""), Degradation("X" * 65), SOCKETS, replace(SOCKETS, message="2"))

    assert derive_degradations(build_status(), forged) == (SOCKETS,)
    assert len(derive_degradations(build_status(), many)) == MAX_DEGRADATIONS


def test_condition_lists_all_and_each_reason_causes_one_event() -> None:
    begun, _ = decide_with(job())
    running, _ = decide_with(begun, *running_pods())
    observation = replace(build_observation(running, *running_pods()), degraded=(SOCKETS, IDLE))

    degraded, decision = decide_once(running, observation)
    again, later_decision = decide_once(degraded, observation)

    condition = next(c for c in degraded.status.conditions if c.type == "Degraded")
    assert (condition.status, condition.reason) == ("True", "IdleGpus")
    assert condition.message == "IdleGpus: 2 of 4 GPUs are idle; NetworkSockets: NCCL uses sockets"
    events = [action for action in decision.actions if isinstance(action, EmitEvent)]
    assert [(event.type, event.reason) for event in events] == [("Warning", "IdleGpus"), ("Warning", "NetworkSockets")]
    assert again.status.degraded == (IDLE, SOCKETS)
    assert not any(isinstance(action, EmitEvent) for action in later_decision.actions)
