"""Each rule decides its own case, and the cause is found among the victims."""

from datetime import UTC, datetime
from typing import Any

import pytest

from finetune_api.termination import USER_ERRORS
from finetune_api.v1alpha1.reasons import FailureAction
from finetune_api.v1alpha1.status import Evidence, Fault
from finetune_operator.failures import container_start_rules as start_failures
from finetune_operator.failures import error_patterns as patterns
from finetune_operator.failures import rules as failure
from finetune_operator.failures.rules import judge, judge_node
from finetune_supervisor import contract


def left(**fields: Any) -> Evidence:
    """What node 1 on gpu-7 left behind after it ended with exit 1."""
    return Evidence(**{"node_rank": 1, "k8s_node": "gpu-7", "ended": True, "exit_code": 1, **fields})


def at(second: float) -> datetime:
    return datetime.fromtimestamp(1_767_268_800 + second, UTC)


CASES: dict[failure.Rule, tuple[Evidence, str, Fault, FailureAction]] = {
    failure.disrupted: (
        left(disruption="PreemptionByScheduler", exit_code=143),
        "Preempted",
        Fault.PREEMPTION,
        FailureAction.RESTART,
    ),
    failure.evicted: (
        left(reason="Evicted", message="Pod ephemeral local storage usage exceeds"),
        "Evicted",
        Fault.RESOURCE,
        FailureAction.FAIL,
    ),
    failure.host_out_of_memory: (left(reason="OOMKilled"), "HostOutOfMemory", Fault.RESOURCE, FailureAction.REPAIR),
    start_failures.not_admitted: (
        left(reason="OutOfcpu"),
        "NodeRefusedPod",
        Fault.INFRASTRUCTURE,
        FailureAction.RESTART,
    ),
    failure.machine_restarted: (
        left(reason="ContainerStatusUnknown", exit_code=137),
        "NodeLost",
        Fault.INFRASTRUCTURE,
        FailureAction.RESTART,
    ),
    start_failures.not_started: (
        left(reason="StartError", exit_code=128, message="nvidia-container-cli: initialization error"),
        "GpuUnavailable",
        Fault.INFRASTRUCTURE,
        FailureAction.RESTART,
    ),
    failure.user_error: (
        left(outcome="failed", error_type="DatasetError", message="a.jsonl line 2: no messages"),
        "DatasetError",
        Fault.USER,
        FailureAction.FAIL,
    ),
    failure.cuda_out_of_memory: (
        left(outcome="failed", error_type="OutOfMemoryError", last_step=36),
        "CudaOutOfMemory",
        Fault.RESOURCE,
        FailureAction.REPAIR,
    ),
    failure.no_name: (
        left(outcome="failed", error_type="DnsTimeout", message="no such name"),
        "RendezvousTimeout",
        Fault.TRANSIENT,
        FailureAction.RESTART,
    ),
    failure.hang: (
        left(outcome="failed", error_type="Hang", rank=5, message="rank 5 is stopped by a signal (SIGSTOP): no sign"),
        "Hang",
        Fault.TRANSIENT,
        FailureAction.RESTART,
    ),
    patterns.told_by_text: (
        left(outcome="failed", error_type="RuntimeError", message="CUDA error: uncorrectable ECC error encountered"),
        "GpuHardware",
        Fault.INFRASTRUCTURE,
        FailureAction.RESTART,
    ),
    failure.victim: (
        left(outcome="failed", error_type="TimeoutError", message="timed out", victim=True),
        "PeerLost",
        Fault.TRANSIENT,
        FailureAction.RESTART,
    ),
    failure.bus_error: (
        left(outcome="failed", error_type="RankKilled", signal=7),
        "SharedMemoryExhausted",
        Fault.RESOURCE,
        FailureAction.REPAIR,
    ),
    failure.killed: (
        left(outcome="failed", error_type="RankKilled", signal=9),
        "RankKilled",
        Fault.TRANSIENT,
        FailureAction.RESTART,
    ),
    failure.deleted: (left(deleted=True, exit_code=None), "PodDeleted", Fault.INFRASTRUCTURE, FailureAction.RESTART),
    failure.stopped: (left(outcome="stopped"), "Stopped", Fault.INFRASTRUCTURE, FailureAction.RESTART),
    failure.storage_fault: (
        left(
            outcome="failed",
            error_type="StorageFault",
            message="checkpoint cannot be loaded: pickle data was truncated",
        ),
        "StorageFault",
        Fault.TRANSIENT,
        FailureAction.RESTART,
    ),
    failure.hub_unavailable: (
        left(outcome="failed", error_type="HubUnavailable", message="503"),
        "HubUnavailable",
        Fault.TRANSIENT,
        FailureAction.RESTART,
    ),
    failure.launcher_failed: (
        left(outcome="failed", error_type="LauncherFailed", message="no ranks"),
        "Unexplained",
        Fault.UNKNOWN,
        FailureAction.RESTART,
    ),
    failure.raised: (
        left(outcome="failed", error_type="ZeroDivisionError", message="division by zero"),
        "UserCodeError",
        Fault.USER,
        FailureAction.FAIL,
    ),
    failure.container_killed: (
        left(exit_code=137, outcome="running"),
        "ContainerKilled",
        Fault.TRANSIENT,
        FailureAction.RESTART,
    ),
    failure.no_result: (left(exit_code=0), "NoResult", Fault.UNKNOWN, FailureAction.RESTART),
    failure.unexplained: (left(exit_code=42), "Unexplained", Fault.UNKNOWN, FailureAction.RESTART),
}


@pytest.mark.parametrize("rule", failure.RULES, ids=lambda rule: rule.__name__)
def test_every_rule_decides_its_own_case(rule: failure.Rule) -> None:
    evidence, reason, fault, action = CASES[rule]  # a rule without a case is a KeyError
    verdict = judge_node(evidence)

    own = rule(evidence)
    assert own is not None
    assert (verdict.reason, verdict.fault, verdict.action) == (reason, fault, action)
    assert verdict.message == own.message
    assert "node 1 (gpu-7)" in verdict.message


def test_the_operator_the_contract_and_the_supervisor_agree_on_user_errors() -> None:
    assert frozenset(contract.USER_ERRORS) == USER_ERRORS
    assert {judge_node(left(outcome="failed", error_type=name)).fault for name in USER_ERRORS} == {Fault.USER}


def test_victims_are_set_aside_whoever_was_first() -> None:
    peer = left(node_rank=0, outcome="failed", victim=True, error_type="RuntimeError", finished_at=at(1.0))
    culprit = left(node_rank=1, outcome="failed", error_type="RankKilled", signal=9, finished_at=at(1.4))
    verdict = judge([peer, culprit])
    assert verdict is not None
    assert (verdict.reason, verdict.evidence) == ("RankKilled", culprit)


def test_of_nodes_that_hang_the_one_that_does_not_wait_for_others_is_named() -> None:
    waits = left(
        node_rank=0, k8s_node="", outcome="failed", error_type="Hang", victim=True, finished_at=at(1), message="waits"
    )
    odd = left(outcome="failed", error_type="Hang", rank=5, finished_at=at(2), message="rank 5 is stopped")

    verdict = judge([waits, odd])

    assert verdict is not None
    assert (verdict.reason, verdict.message) == ("Hang", "node 1 (gpu-7): rank 5 is stopped")
    alone = judge([waits])
    assert alone is not None
    assert alone.reason == "Hang"


def test_of_two_causes_the_earlier_decides() -> None:
    first = left(node_rank=1, outcome="failed", error_type="KeyError", finished_at=at(1.00))
    second = left(node_rank=0, outcome="failed", error_type="ValueError", finished_at=at(1.05))
    verdict = judge([second, first])
    assert verdict is not None
    assert verdict.evidence == first


def test_a_node_that_we_stopped_is_not_the_cause() -> None:
    stopped = left(node_rank=0, exit_code=137, outcome="stopped", finished_at=at(0.5))
    victim = left(node_rank=1, outcome="failed", victim=True, finished_at=at(1.0))
    verdict = judge([stopped, victim])
    assert verdict is not None
    assert verdict.reason == "PeerLost"


def test_oom_killed_with_exit_0_and_a_published_result_is_a_success() -> None:
    assert judge([left(reason="OOMKilled", exit_code=0, outcome="succeeded")]) is None


def test_a_segfault_is_not_transient() -> None:
    verdict = judge_node(left(outcome="failed", error_type="RankKilled", signal=11, rank=3))
    assert (verdict.reason, verdict.fault) == ("RankCrashed", Fault.UNKNOWN)
    assert "rank 3 was ended by SIGSEGV" in verdict.message
