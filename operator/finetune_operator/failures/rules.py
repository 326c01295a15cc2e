"""Ordered failure rules, which return a verdict for the evidence of a node; the first matching rule applies.

The root cause of a failed attempt is a pod that another client deleted, otherwise the earliest failure of a node that
is not a victim. A victim failed only because another node failed.
"""

import signal as signals
from collections.abc import Callable, Iterable
from dataclasses import replace
from datetime import UTC, datetime

from finetune_api.termination import USER_ERRORS, Outcome
from finetune_api.v1alpha1.reasons import Reason
from finetune_api.v1alpha1.status import Evidence
from finetune_operator.failures.container_start_rules import container_not_started
from finetune_operator.failures.error_patterns import matches_error_pattern
from finetune_operator.failures.kubelet_rejections import is_node_under_pressure, rejected_by_kubelet
from finetune_operator.failures.verdict import Verdict, describe_node, extract_last_line

Rule = Callable[[Evidence], Verdict | None]

DISRUPTION_MESSAGES = {
    "PreemptionByScheduler": "preempted by a pod of higher priority",
    "EvictionByEvictionAPI": "drained from its Kubernetes node",
    "TerminationByKubelet": "ended by its kubelet",
    "DeletionByTaintManager": "its Kubernetes node was lost",
    "DeletionByPodGC": "its Kubernetes node is gone",
}
# reasons of the condition TerminationTarget that Kueue sets; a longer one ends in the reason of the eviction
KUEUE_EVICTION = "WorkloadEvicted"
KUEUE_MESSAGES = {
    "WorkloadDeleted": "its Workload was deleted",
    "NoMatchingWorkload": "it has no matching Workload",
    "NotAdmitted": "its Workload is not admitted",
}
INTERFERENCE_MESSAGES = {
    "Relabelled": "lost its labels, so that the operator cannot watch it",
    "Restarted": "was restarted in place by its kubelet, as after an edit of the pod",
}
NODE_LOST_DISRUPTIONS = frozenset({"DeletionByTaintManager", "DeletionByPodGC"})


def pod_disrupted(evidence: Evidence) -> Verdict | None:
    """Match a pod that the cluster disrupted; the restart counts as an infrastructure restart."""
    if evidence.disruption not in DISRUPTION_MESSAGES:
        return None
    return Verdict(
        reason=Reason.NODE_LOST if evidence.disruption in NODE_LOST_DISRUPTIONS else Reason.PREEMPTED,
        message=f"{describe_node(evidence)}: {DISRUPTION_MESSAGES[evidence.disruption]}",
    )


def evicted_by_kueue(evidence: Evidence) -> Verdict | None:
    """Match a pod that Kueue stopped; the restart counts only if Kueue names no preemptor (decisions/217)."""
    is_eviction = evidence.disruption.startswith(KUEUE_EVICTION)
    if not is_eviction and evidence.disruption not in KUEUE_MESSAGES:
        return None
    pod = f"{describe_node(evidence)}: Kueue stopped pod {evidence.pod_name}"
    if evidence.preemptor:
        return Verdict(Reason.PREEMPTED, f"{pod} in favour of {evidence.preemptor}", preemptor=evidence.preemptor)
    cause = evidence.disruption.removeprefix(KUEUE_EVICTION).removeprefix("DueTo") or "its Workload was evicted"
    return Verdict(Reason.PREEMPTED, f"{pod}: {KUEUE_MESSAGES.get(evidence.disruption, cause)}")


def pod_evicted(evidence: Evidence) -> Verdict | None:
    """Match an eviction by the kubelet because of exceeded ephemeral storage, which a restart would exceed again."""
    if evidence.reason != "Evicted" or is_node_under_pressure(evidence):
        return None
    detail = extract_last_line(evidence.message)
    return Verdict(
        reason=Reason.EVICTED,
        message=f"{describe_node(evidence)}: {detail}; raise ephemeral-storage in resources.limits",
    )


def host_out_of_memory(evidence: Evidence) -> Verdict | None:
    """Match a process killed by the kernel's OOM killer; an unchanged job would run out of memory again."""
    if evidence.reason != "OOMKilled" or evidence.outcome == Outcome.SUCCEEDED:
        return None
    return Verdict(
        reason=Reason.HOST_OUT_OF_MEMORY,
        message=f"{describe_node(evidence)} ran out of host memory at step {evidence.last_step or 0}",
    )


def kubernetes_node_restarted(evidence: Evidence) -> Verdict | None:
    """Match a container whose exit status is unknown because its Kubernetes node was restarted.

    The kubelet reports ContainerStatusUnknown also for a deleted pod whose container it had not started yet.
    """
    is_unknown_to_runtime = evidence.reason == "Unknown" and evidence.exit_code == 255
    is_deleted = evidence.deleted or evidence.outcome == Outcome.STOPPED
    if not is_unknown_to_runtime and (evidence.reason != "ContainerStatusUnknown" or is_deleted):
        return None
    return Verdict(
        reason=Reason.NODE_LOST,
        message=f"{describe_node(evidence)}: the end of the container is unknown; its Kubernetes node was restarted",
    )


def user_error(evidence: Evidence) -> Verdict | None:
    """Match an error in the spec, the dataset or the storage, as reported by the trainer."""
    if evidence.error_type not in USER_ERRORS:
        return None
    return Verdict(
        reason=Reason(evidence.error_type),
        message=f"{describe_node(evidence)}: {extract_last_line(evidence.message)}",
    )


def config_map_replaced(evidence: Evidence) -> Verdict | None:
    """Match a pod whose ConfigMap was replaced; the next attempt has a ConfigMap with another name."""
    if evidence.error_type != Reason.CONFIG_MAP_REPLACED:
        return None
    return Verdict(
        reason=Reason.CONFIG_MAP_REPLACED,
        message=f"{describe_node(evidence)}: {extract_last_line(evidence.message)}",
    )


def cuda_out_of_memory(evidence: Evidence) -> Verdict | None:
    """Match a GPU that ran out of memory; the same batch would fail again, but a smaller one may fit."""
    is_reported = evidence.error_type == Reason.CUDA_OUT_OF_MEMORY
    is_reported_by_torch = evidence.error_type == "OutOfMemoryError" or "CUDA out of memory" in evidence.message
    if not is_reported and not is_reported_by_torch and evidence.category != Reason.CUDA_OUT_OF_MEMORY:
        return None
    description = f"ran out of GPU memory at step {evidence.last_step or 0}"
    detail = extract_last_line(evidence.message) if is_reported else description
    return Verdict(
        reason=Reason.CUDA_OUT_OF_MEMORY,
        message=f"{describe_node(evidence)} {detail}",
    )


def pod_deleted(evidence: Evidence) -> Verdict | None:
    """Match a pod that a user deleted or that disappeared together with its Kubernetes node."""
    if not evidence.deleted:
        return None
    pod = f"pod {evidence.pod_name}" if evidence.pod_name else "its pod"
    return Verdict(
        reason=Reason.POD_DELETED,
        message=f"{describe_node(evidence)}: {pod} {INTERFERENCE_MESSAGES.get(evidence.reason, 'was deleted')}",
    )


def rendezvous_failed(evidence: Evidence) -> Verdict | None:
    """Match a failed rendezvous: node 0 did not appear in DNS or did not accept connections."""
    if evidence.error_type not in ("DnsTimeout", "RendezvousTimeoutError", "RendezvousConnectionError"):
        return None
    return Verdict(
        reason=Reason.RENDEZVOUS_TIMEOUT,
        message=f"{describe_node(evidence)}: {extract_last_line(evidence.message)}",
        victim=True,
    )


_REPORTED_FAULTS = (
    Reason.STORAGE_FAULT,
    Reason.GPU_HARDWARE,
    Reason.GPU_UNAVAILABLE,
    Reason.DRIVER_MISMATCH,
    Reason.NETWORK_FAULT,
)


def reported_fault(evidence: Evidence) -> Verdict | None:
    """Match a fault of storage, GPU, driver or network that the trainer reported, with any message."""
    if evidence.error_type not in _REPORTED_FAULTS:
        return None
    return Verdict(
        reason=Reason(evidence.error_type),
        message=f"{describe_node(evidence)}: {extract_last_line(evidence.message)}",
    )


def rank_hung(evidence: Evidence) -> Verdict | None:
    """Match a rank whose heartbeat is too old; its supervisor reports whether the rank is a victim."""
    if evidence.error_type != Reason.HANG:
        return None
    return Verdict(
        reason=Reason.HANG,
        message=f"{describe_node(evidence.model_copy(update={'rank': None}))}: {extract_last_line(evidence.message)}",
        victim=evidence.victim,
    )


def peer_lost(evidence: Evidence) -> Verdict | None:
    """Match an error that the supervisor classified as the loss of a peer, so the node is a victim."""
    if not evidence.victim:
        return None
    return Verdict(
        reason=Reason.PEER_LOST,
        message=f"{describe_node(evidence)} lost its peers: {evidence.error_type}:"
        f" {extract_last_line(evidence.message)}",
        victim=True,
    )


def bus_error(evidence: Evidence) -> Verdict | None:
    """Match a rank that could not load a page of a memory-mapped file, usually because /dev/shm is full."""
    if evidence.signal != signals.SIGBUS or evidence.outcome == Outcome.STOPPED:
        return None
    return Verdict(
        reason=Reason.SHARED_MEMORY_EXHAUSTED,
        message=f"{describe_node(evidence)} was ended by SIGBUS, which a full /dev/shm causes",
    )


def rank_killed(evidence: Evidence) -> Verdict | None:
    """Match a rank that was killed by a signal that neither the operator nor the supervisor sent."""
    if evidence.signal is None or evidence.outcome == Outcome.STOPPED:
        return None
    try:
        name = signals.Signals(evidence.signal).name
    except ValueError:
        name = f"signal {evidence.signal}"
    is_crash = name in ("SIGSEGV", "SIGABRT", "SIGFPE", "SIGILL")
    return Verdict(
        reason=Reason.RANK_CRASHED if is_crash else Reason.RANK_KILLED,
        message=f"{describe_node(evidence)} was ended by {name}",
    )


def node_stopped(evidence: Evidence) -> Verdict | None:
    """Match a node that was stopped and is therefore not the root cause."""
    if evidence.outcome != Outcome.STOPPED and evidence.ended:
        return None
    return Verdict(
        reason=Reason.STOPPED,
        message=f"{describe_node(evidence)} was stopped",
        victim=True,
    )


def hub_unavailable(evidence: Evidence) -> Verdict | None:
    """Match an unavailable Hub; a later attempt may succeed."""
    if evidence.error_type != "HubUnavailable":
        return None
    return Verdict(
        reason=Reason.HUB_UNAVAILABLE,
        message=f"{describe_node(evidence)}: {extract_last_line(evidence.message)}",
    )


def launcher_failed(evidence: Evidence) -> Verdict | None:
    """Match a launcher or rank that exited without a recorded exception."""
    if evidence.error_type not in ("LauncherFailed", "RankExited", "UnknownError"):
        return None
    return Verdict(
        reason=Reason.UNEXPLAINED,
        message=f"{describe_node(evidence)}: {evidence.error_type}: {extract_last_line(evidence.message)}",
    )


def exception_raised(evidence: Evidence) -> Verdict | None:
    """Match an exception that no other rule matches; a restart would raise it again."""
    if evidence.outcome != Outcome.FAILED or not evidence.error_type:
        return None
    return Verdict(
        reason=Reason.USER_CODE_ERROR,
        message=f"{describe_node(evidence)}: {evidence.error_type}: {extract_last_line(evidence.message)}",
    )


def container_killed(evidence: Evidence) -> Verdict | None:
    """Match a container that was killed before its supervisor wrote a termination message."""
    if evidence.exit_code not in (137, 143):
        return None
    return Verdict(
        reason=Reason.CONTAINER_KILLED,
        message=f"{describe_node(evidence)}: the container was killed (exit {evidence.exit_code})",
    )


def result_missing(evidence: Evidence) -> Verdict | None:
    """Match a node that exited with code 0 but without a success marker, which does not count as success."""
    if evidence.exit_code != 0 or evidence.outcome == Outcome.SUCCEEDED:
        return None
    return Verdict(
        reason=Reason.NO_RESULT,
        message=f"{describe_node(evidence)} ended with exit 0 but left no result",
    )


def unexplained_failure(evidence: Evidence) -> Verdict | None:
    """Match any evidence, as the fallback after all other rules."""
    detail = extract_last_line(evidence.message) or evidence.reason or "no message"
    return Verdict(
        reason=Reason.UNEXPLAINED,
        message=f"{describe_node(evidence)} failed with exit {evidence.exit_code}: {detail}",
    )


RULES: tuple[Rule, ...] = (
    pod_disrupted,
    evicted_by_kueue,
    pod_evicted,
    host_out_of_memory,
    rejected_by_kubelet,
    kubernetes_node_restarted,
    container_not_started,
    user_error,
    config_map_replaced,
    cuda_out_of_memory,
    pod_deleted,
    rendezvous_failed,
    reported_fault,
    rank_hung,
    matches_error_pattern,
    peer_lost,
    bus_error,
    rank_killed,
    node_stopped,
    hub_unavailable,
    launcher_failed,
    exception_raised,
    container_killed,
    result_missing,
    unexplained_failure,
)

_LATEST_TIME = datetime.max.replace(tzinfo=UTC)


def judge(node_evidence: Iterable[Evidence]) -> Verdict | None:
    """Return the verdict on the root cause; None if no node failed."""
    verdicts = [judge_node(evidence) for evidence in node_evidence if not has_succeeded(evidence)]
    if not verdicts:
        return None
    return min(verdicts, key=_build_sort_key)


def select_most_relevant(node_evidence: tuple[Evidence, ...], *, limit: int) -> tuple[Evidence, ...]:
    """Return the evidence of at most `limit` nodes, the most likely root causes, ordered by node rank."""
    if len(node_evidence) <= limit:
        return node_evidence
    by_relevance = sorted(
        node_evidence, key=lambda evidence: (has_succeeded(evidence), _build_sort_key(judge_node(evidence)))
    )
    return tuple(sorted(by_relevance[:limit], key=lambda evidence: evidence.node_rank))


def judge_node(evidence: Evidence) -> Verdict:
    """Return the verdict of the first rule that matches; `unexplained_failure` matches any evidence."""
    for rule in RULES:
        verdict = rule(evidence)
        if verdict is not None:
            return replace(verdict, evidence=evidence)
    raise AssertionError("unexplained_failure matches any evidence")


def has_succeeded(evidence: Evidence) -> bool:
    """Return whether the node reported success and ended with exit code 0."""
    return evidence.outcome == Outcome.SUCCEEDED and evidence.exit_code == 0


def _build_sort_key(verdict: Verdict) -> tuple[bool, bool, bool, datetime, int]:
    """Return a sort key for root causes: victims after other failures, stopped nodes last, then by time.

    A pod that another client deleted precedes other failures, because it ends only after its grace period, and its
    peers may fail before that with errors that are not recognised as the loss of a peer (decisions/216).
    """
    evidence = verdict.evidence
    assert evidence is not None
    was_stopped = verdict.reason is Reason.STOPPED
    finished_at = evidence.finished_at or _LATEST_TIME
    return verdict.victim, was_stopped, not evidence.deleted, finished_at, evidence.node_rank
