"""Tests of the verdict of each failure rule and of the selection of the root cause."""

from datetime import UTC, datetime
from typing import Any

import pytest

from finetune_api.termination import USER_ERRORS
from finetune_api.v1alpha1.reasons import FailureAction
from finetune_api.v1alpha1.status import Evidence, Fault
from finetune_operator.failures import container_start_rules, error_patterns, kubelet_rejections, rules
from finetune_operator.failures.rules import judge, judge_node
from finetune_supervisor import contract


def node_evidence(**fields: Any) -> Evidence:
    """Return the evidence of node 1, which exited with code 1 on the Kubernetes node gpu-7."""
    return Evidence(**{"node_rank": 1, "k8s_node": "gpu-7", "ended": True, "exit_code": 1, **fields})


def time_at(seconds: float) -> datetime:
    return datetime.fromtimestamp(1_767_268_800 + seconds, UTC)


RESTART, REPAIR, FAIL = FailureAction.RESTART, FailureAction.REPAIR, FailureAction.FAIL
FAILED = {"outcome": "failed"}
EXAMPLES: dict[rules.Rule, tuple[Evidence, str, Fault, FailureAction]] = {
    rules.pod_disrupted: (
        node_evidence(disruption="PreemptionByScheduler", exit_code=143),
        "Preempted",
        Fault.PREEMPTION,
        RESTART,
    ),
    rules.evicted_by_kueue: (
        node_evidence(disruption="WorkloadEvictedDueToPodsReadyTimeout", deleted=True, exit_code=143),
        "Preempted",
        Fault.PREEMPTION,
        RESTART,
    ),
    rules.pod_evicted: (
        node_evidence(reason="Evicted", message="Pod ephemeral local storage usage exceeds"),
        "Evicted",
        Fault.RESOURCE,
        FAIL,
    ),
    rules.host_out_of_memory: (node_evidence(reason="OOMKilled"), "HostOutOfMemory", Fault.RESOURCE, REPAIR),
    kubelet_rejections.rejected_by_kubelet: (
        node_evidence(reason="OutOfcpu"),
        "NodeRefusedPod",
        Fault.INFRASTRUCTURE,
        RESTART,
    ),
    rules.kubernetes_node_restarted: (
        node_evidence(reason="ContainerStatusUnknown", exit_code=137),
        "NodeLost",
        Fault.INFRASTRUCTURE,
        RESTART,
    ),
    container_start_rules.container_not_started: (
        node_evidence(reason="StartError", exit_code=128, message="nvidia-container-cli: initialization error"),
        "GpuUnavailable",
        Fault.INFRASTRUCTURE,
        RESTART,
    ),
    rules.user_error: (
        node_evidence(**FAILED, error_type="DatasetError", message="a.jsonl line 2: no messages"),
        "DatasetError",
        Fault.USER,
        FAIL,
    ),
    rules.cuda_out_of_memory: (
        node_evidence(**FAILED, error_type="OutOfMemoryError", last_step=36),
        "CudaOutOfMemory",
        Fault.RESOURCE,
        REPAIR,
    ),
    rules.rendezvous_failed: (
        node_evidence(**FAILED, error_type="DnsTimeout", message="host not found"),
        "RendezvousTimeout",
        Fault.TRANSIENT,
        RESTART,
    ),
    rules.rank_hung: (
        node_evidence(**FAILED, error_type="Hang", rank=5, message="rank 5 is stopped by a signal (SIGSTOP): no sign"),
        "Hang",
        Fault.TRANSIENT,
        RESTART,
    ),
    error_patterns.matches_error_pattern: (
        node_evidence(**FAILED, error_type="RuntimeError", message="CUDA error: uncorrectable ECC error encountered"),
        "GpuHardware",
        Fault.INFRASTRUCTURE,
        RESTART,
    ),
    rules.peer_lost: (
        node_evidence(**FAILED, error_type="TimeoutError", message="timed out", victim=True),
        "PeerLost",
        Fault.TRANSIENT,
        RESTART,
    ),
    rules.bus_error: (
        node_evidence(**FAILED, error_type="RankKilled", signal=7),
        "SharedMemoryExhausted",
        Fault.RESOURCE,
        REPAIR,
    ),
    rules.rank_killed: (
        node_evidence(**FAILED, error_type="RankKilled", signal=9),
        "RankKilled",
        Fault.TRANSIENT,
        RESTART,
    ),
    rules.pod_deleted: (node_evidence(deleted=True, exit_code=None), "PodDeleted", Fault.INFRASTRUCTURE, RESTART),
    rules.node_stopped: (node_evidence(outcome="stopped"), "Stopped", Fault.INFRASTRUCTURE, RESTART),
    rules.reported_fault: (
        node_evidence(
            **FAILED, error_type="StorageFault", message="checkpoint cannot be loaded: pickle data was truncated"
        ),
        "StorageFault",
        Fault.TRANSIENT,
        RESTART,
    ),
    rules.config_map_replaced: (
        node_evidence(
            **FAILED,
            error_type="ConfigMapReplaced",
            message="ConfigMap bert-0-11111111, key job.json: expected SHA-256 12, found 34",
        ),
        "ConfigMapReplaced",
        Fault.INFRASTRUCTURE,
        RESTART,
    ),
    rules.hub_unavailable: (
        node_evidence(**FAILED, error_type="HubUnavailable", message="503"),
        "HubUnavailable",
        Fault.TRANSIENT,
        RESTART,
    ),
    rules.launcher_failed: (
        node_evidence(**FAILED, error_type="LauncherFailed", message="no ranks"),
        "Unexplained",
        Fault.UNKNOWN,
        RESTART,
    ),
    rules.exception_raised: (
        node_evidence(**FAILED, error_type="ZeroDivisionError", message="division by zero"),
        "UserCodeError",
        Fault.USER,
        FAIL,
    ),
    rules.container_killed: (
        node_evidence(exit_code=137, outcome="running"),
        "ContainerKilled",
        Fault.TRANSIENT,
        RESTART,
    ),
    rules.result_missing: (node_evidence(exit_code=0), "NoResult", Fault.UNKNOWN, RESTART),
    rules.unexplained_failure: (node_evidence(exit_code=42), "Unexplained", Fault.UNKNOWN, RESTART),
}


@pytest.mark.parametrize("rule", rules.RULES, ids=lambda rule: rule.__name__)
def test_each_rule_is_the_first_match_for_its_example(rule: rules.Rule) -> None:
    evidence, reason, fault, action = EXAMPLES[rule]  # raises KeyError if a rule has no example
    verdict = judge_node(evidence)

    own_verdict = rule(evidence)
    assert own_verdict is not None
    assert (verdict.reason, verdict.fault, verdict.action) == (reason, fault, action)
    assert verdict.message == own_verdict.message
    assert "node 1 (gpu-7)" in verdict.message


def test_operator_and_supervisor_define_the_same_user_errors() -> None:
    assert frozenset(contract.USER_ERRORS) == USER_ERRORS
    assert {judge_node(node_evidence(outcome="failed", error_type=name)).fault for name in USER_ERRORS} == {Fault.USER}


@pytest.mark.parametrize(
    ("other", "root_cause", "reason"),
    [
        pytest.param(
            {**FAILED, "victim": True, "error_type": "RuntimeError", "finished_at": time_at(1.0)},
            {**FAILED, "error_type": "RankKilled", "signal": 9, "finished_at": time_at(1.4)},
            "RankKilled",
            id="a victim is not, even if it failed first",
        ),
        pytest.param(
            {**FAILED, "error_type": "ValueError", "finished_at": time_at(1.05)},
            {**FAILED, "error_type": "KeyError", "finished_at": time_at(1.00)},
            "UserCodeError",
            id="the earlier of two failures",
        ),
        pytest.param(
            {"exit_code": 137, "outcome": "stopped", "finished_at": time_at(0.5)},
            {**FAILED, "victim": True, "finished_at": time_at(1.0)},
            "PeerLost",
            id="a node stopped by the operator is not",
        ),
        pytest.param(
            {**FAILED, "error_type": "RuntimeError", "finished_at": time_at(1)},
            {"deleted": True, "outcome": "stopped", "exit_code": 143, "finished_at": time_at(20)},
            "PodDeleted",
            id="a pod deleted by another client precedes failures of its peers",
        ),
    ],
)
def test_one_of_two_ended_nodes_is_the_root_cause(
    other: dict[str, Any], root_cause: dict[str, Any], reason: str
) -> None:
    expected = node_evidence(**root_cause)
    verdict = judge([node_evidence(node_rank=0, **other), expected])

    assert verdict is not None
    assert (verdict.reason, verdict.evidence) == (reason, expected)


@pytest.mark.parametrize("reason", ["StorageFault", "DriverMismatch", "GpuUnavailable", "GpuHardware", "NetworkFault"])
def test_fault_that_the_trainer_reports_is_the_reason_whatever_its_message(reason: str) -> None:
    verdict = judge_node(node_evidence(outcome="failed", error_type=reason, message="out of ideas"))

    assert verdict.reason == reason


def test_hanging_node_is_the_root_cause_and_the_waiting_node_is_its_victim() -> None:
    waiting = node_evidence(
        node_rank=0,
        k8s_node="",
        outcome="failed",
        error_type="Hang",
        victim=True,
        finished_at=time_at(1),
        message="waits",
    )
    hanging = node_evidence(
        outcome="failed", error_type="Hang", rank=5, finished_at=time_at(2), message="rank 5 is stopped"
    )

    verdict = judge([waiting, hanging])

    assert verdict is not None
    assert (verdict.reason, verdict.message) == ("Hang", "node 1 (gpu-7): rank 5 is stopped")
    only_waiting = judge([waiting])
    assert only_waiting is not None
    assert only_waiting.reason == "Hang"


def test_oom_killed_pod_with_a_published_result_is_a_success() -> None:
    assert judge([node_evidence(reason="OOMKilled", exit_code=0, outcome="succeeded")]) is None


def test_a_segmentation_fault_is_not_transient() -> None:
    verdict = judge_node(node_evidence(outcome="failed", error_type="RankKilled", signal=11, rank=3))
    assert (verdict.reason, verdict.fault) == ("RankCrashed", Fault.UNKNOWN)
    assert "rank 3 was ended by SIGSEGV" in verdict.message


@pytest.mark.parametrize(
    ("reason", "preemptor", "message"),
    [
        pytest.param(
            "WorkloadEvictedDueToPreempted",
            "workload 527a9fa8 of job 1f1c675a",
            " in favour of workload 527a9fa8 of job 1f1c675a",
            id="preempted by a named workload",
        ),
        pytest.param("WorkloadEvictedDueToPreempted", "", ": Preempted", id="preempted by an unknown workload"),
        pytest.param("WorkloadEvictedDueToPodsReadyTimeout", "", ": PodsReadyTimeout", id="another eviction"),
        pytest.param("WorkloadEvicted", "", ": its Workload was evicted", id="eviction of an older Kueue"),
        pytest.param("WorkloadDeleted", "", ": its Workload was deleted", id="deleted Workload"),
    ],
)
def test_an_eviction_by_kueue_is_a_preemption(reason: str, preemptor: str, message: str) -> None:
    verdict = judge_node(node_evidence(pod_name="bert-0-1", disruption=reason, preemptor=preemptor, deleted=True))

    assert (verdict.reason, verdict.preemptor) == ("Preempted", preemptor)
    assert verdict.message == f"node 1 (gpu-7): Kueue stopped pod bert-0-1{message}"


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        pytest.param({}, "NodeLost", id="pod not deleted"),
        pytest.param({"deleted": True}, "PodDeleted", id="deleted by another client"),
        pytest.param({"outcome": "stopped"}, "Stopped", id="deleted by the operator"),
    ],
)
def test_an_unknown_container_status_of_a_deleted_pod_is_no_node_loss(fields: dict[str, Any], reason: str) -> None:
    unknown = node_evidence(reason="ContainerStatusUnknown", exit_code=137, **fields)
    assert judge_node(unknown).reason == reason


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        pytest.param("failed to create containerd task: context canceled", "PodDeleted", id="unknown error"),
        pytest.param("runc create failed: cgroup is gone", "PodDeleted", id="error of the runtime"),
        pytest.param('exec: \\"train\\": executable file not found in $PATH', "StartError", id="error of the image"),
    ],
)
def test_a_start_error_of_a_deleted_pod_is_the_cause_only_if_it_is_not_due_to_the_deletion(
    message: str, reason: str
) -> None:
    assert judge_node(node_evidence(reason="StartError", exit_code=128, message=message, deleted=True)).reason == reason
