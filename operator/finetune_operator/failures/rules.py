"""Failure rules: an ordered tuple of functions from the evidence of a node to a verdict; the first match decides.

The root cause of a failed attempt is one node: victims, which failed only because another node did, are set aside;
of the others the earliest failure decides.
"""

import signal as signals
from collections.abc import Callable, Iterable
from dataclasses import replace
from datetime import UTC, datetime

from finetune_api.termination import USER_ERRORS, Outcome
from finetune_api.v1alpha1.reasons import Reason
from finetune_api.v1alpha1.status import Evidence
from finetune_operator.failures.error_patterns import matches_error_pattern
from finetune_operator.failures.pod_start_rules import (
    container_not_started,
    is_node_under_pressure,
    rejected_by_kubelet,
)
from finetune_operator.failures.verdict import Verdict, describe_node, extract_last_line

Rule = Callable[[Evidence], Verdict | None]

DISRUPTION_MESSAGES = {
    "PreemptionByScheduler": "preempted by a pod of higher priority",
    "EvictionByEvictionAPI": "drained from its Kubernetes node",
    "TerminationByKubelet": "ended by its kubelet",
    "DeletionByTaintManager": "its Kubernetes node was lost",
    "DeletionByPodGC": "its Kubernetes node is gone",
}
INTERFERENCE_MESSAGES = {
    "Relabelled": "lost its labels, so that the operator cannot watch it",
    "Restarted": "was restarted in place by its kubelet, as after an edit of the pod",
}
NODE_LOST_DISRUPTIONS = frozenset({"DeletionByTaintManager", "DeletionByPodGC"})


def disrupted(evidence: Evidence) -> Verdict | None:
    """The cluster disrupted the pod: not a fault of the job, so it uses no counted restart."""
    if evidence.disruption not in DISRUPTION_MESSAGES:
        return None
    return Verdict(
        reason=Reason.NODE_LOST if evidence.disruption in NODE_LOST_DISRUPTIONS else Reason.PREEMPTED,
        message=f"{describe_node(evidence)}: {DISRUPTION_MESSAGES[evidence.disruption]}",
    )


def evicted(evidence: Evidence) -> Verdict | None:
    """Evicted without a disruption: the pod exceeded its ephemeral storage limits and would do so again."""
    if evidence.reason != "Evicted" or is_node_under_pressure(evidence):
        return None
    detail = extract_last_line(evidence.message)
    return Verdict(
        reason=Reason.EVICTED,
        message=f"{describe_node(evidence)}: {detail}; raise ephemeral-storage in resources.limits",
    )


def host_out_of_memory(evidence: Evidence) -> Verdict | None:
    """The kernel OOM killer ended a process of the container: the next attempt needs a change to fit."""
    if evidence.reason != "OOMKilled" or evidence.outcome == Outcome.SUCCEEDED:
        return None
    return Verdict(
        reason=Reason.HOST_OUT_OF_MEMORY,
        message=f"{describe_node(evidence)} ran out of host memory at step {evidence.last_step or 0}",
    )


def kubernetes_node_restarted(evidence: Evidence) -> Verdict | None:
    """The kubelet or runtime restarted and has no record of how the container ended: the host lost power."""
    by_runtime = evidence.reason == "Unknown" and evidence.exit_code == 255
    if not by_runtime and evidence.reason != "ContainerStatusUnknown":
        return None
    return Verdict(
        reason=Reason.NODE_LOST,
        message=f"{describe_node(evidence)}: the end of the container is unknown; its Kubernetes node was restarted",
    )


def user_error(evidence: Evidence) -> Verdict | None:
    """The trainer reported an error in the spec, the rows or the storage."""
    if evidence.error_type not in USER_ERRORS:
        return None
    return Verdict(
        reason=Reason(evidence.error_type),
        message=f"{describe_node(evidence)}: {extract_last_line(evidence.message)}",
    )


def cuda_out_of_memory(evidence: Evidence) -> Verdict | None:
    """The GPU ran out of memory: the same batch would fail again, a smaller one may fit."""
    is_reported = evidence.error_type == Reason.CUDA_OUT_OF_MEMORY
    if not is_reported and evidence.error_type != "OutOfMemoryError" and "CUDA out of memory" not in evidence.message:
        return None
    detail = extract_last_line(evidence.message) if is_reported else f"ran out of GPU memory at step {evidence.last_step or 0}"
    return Verdict(
        reason=Reason.CUDA_OUT_OF_MEMORY,
        message=f"{describe_node(evidence)} {detail}",
    )


def deleted(evidence: Evidence) -> Verdict | None:
    """A user deleted the pod, or it disappeared together with its Kubernetes node."""
    if not evidence.deleted:
        return None
    pod = f"pod {evidence.pod_name}" if evidence.pod_name else "its pod"
    return Verdict(
        reason=Reason.POD_DELETED,
        message=f"{describe_node(evidence)}: {pod} {INTERFERENCE_MESSAGES.get(evidence.reason, 'was deleted')}",
    )


def rendezvous_failed(evidence: Evidence) -> Verdict | None:
    """Node 0 did not appear in DNS or did not accept connections, so the rendezvous failed."""
    if evidence.error_type not in ("DnsTimeout", "RendezvousTimeoutError", "RendezvousConnectionError"):
        return None
    return Verdict(
        reason=Reason.RENDEZVOUS_TIMEOUT,
        message=f"{describe_node(evidence)}: {extract_last_line(evidence.message)}",
        victim=True,
    )


def storage_fault(evidence: Evidence) -> Verdict | None:
    """The trainer reported an I/O error of a file system, whatever the text of the exception is."""
    if evidence.error_type != Reason.STORAGE_FAULT:
        return None
    return Verdict(
        reason=Reason.STORAGE_FAULT,
        message=f"{describe_node(evidence)}: {extract_last_line(evidence.message)}",
    )


def hang(evidence: Evidence) -> Verdict | None:
    """A rank sent no heartbeat for too long; its supervisor reports which one, and whether it is only a victim."""
    if evidence.error_type != Reason.HANG:
        return None
    return Verdict(
        reason=Reason.HANG,
        message=f"{describe_node(evidence.model_copy(update={'rank': None}))}: {extract_last_line(evidence.message)}",
        victim=evidence.victim,
    )


def victim(evidence: Evidence) -> Verdict | None:
    """The supervisor recognised the error as the loss of a peer: the node is a victim."""
    if not evidence.victim:
        return None
    return Verdict(
        reason=Reason.PEER_LOST,
        message=f"{describe_node(evidence)} lost its peers: {evidence.error_type}: {extract_last_line(evidence.message)}",
        victim=True,
    )


def bus_error(evidence: Evidence) -> Verdict | None:
    """A rank could not load a page of a memory-mapped file, most often because /dev/shm is full."""
    if evidence.signal != signals.SIGBUS or evidence.outcome == Outcome.STOPPED:
        return None
    return Verdict(
        reason=Reason.SHARED_MEMORY_EXHAUSTED,
        message=f"{describe_node(evidence)} was ended by SIGBUS, which a full /dev/shm causes",
    )


def killed(evidence: Evidence) -> Verdict | None:
    """A rank was ended by a signal that neither the operator nor the supervisor sent."""
    if evidence.signal is None or evidence.outcome == Outcome.STOPPED:
        return None
    try:
        name = signals.Signals(evidence.signal).name
    except ValueError:
        name = f"signal {evidence.signal}"
    crashed = name in ("SIGSEGV", "SIGABRT", "SIGFPE", "SIGILL")
    return Verdict(
        reason=Reason.RANK_CRASHED if crashed else Reason.RANK_KILLED,
        message=f"{describe_node(evidence)} was ended by {name}",
    )


def stopped(evidence: Evidence) -> Verdict | None:
    """The node was stopped, so another node is the cause."""
    if evidence.outcome != Outcome.STOPPED and evidence.ended:
        return None
    return Verdict(
        reason=Reason.STOPPED,
        message=f"{describe_node(evidence)} was stopped",
        victim=True,
    )


def hub_unavailable(evidence: Evidence) -> Verdict | None:
    """The Hub did not answer; a later attempt may succeed."""
    if evidence.error_type != "HubUnavailable":
        return None
    return Verdict(
        reason=Reason.HUB_UNAVAILABLE,
        message=f"{describe_node(evidence)}: {extract_last_line(evidence.message)}",
    )


def launcher_failed(evidence: Evidence) -> Verdict | None:
    """A launcher or a rank ended without a recorded exception."""
    if evidence.error_type not in ("LauncherFailed", "RankExited", "UnknownError"):
        return None
    return Verdict(
        reason=Reason.UNEXPLAINED,
        message=f"{describe_node(evidence)}: {evidence.error_type}: {extract_last_line(evidence.message)}",
    )


def raised(evidence: Evidence) -> Verdict | None:
    """A rank raised an exception that no other rule matches: a restart would raise it again."""
    if evidence.outcome != Outcome.FAILED or not evidence.error_type:
        return None
    return Verdict(
        reason=Reason.USER_CODE_ERROR,
        message=f"{describe_node(evidence)}: {evidence.error_type}: {extract_last_line(evidence.message)}",
    )


def container_killed(evidence: Evidence) -> Verdict | None:
    """The container was killed from outside before its supervisor wrote a termination message."""
    if evidence.exit_code not in (137, 143):
        return None
    return Verdict(
        reason=Reason.CONTAINER_KILLED,
        message=f"{describe_node(evidence)}: the container was killed (exit {evidence.exit_code})",
    )


def no_result(evidence: Evidence) -> Verdict | None:
    """The node exited with 0 without a success marker, which does not count as success."""
    if evidence.exit_code != 0 or evidence.outcome == Outcome.SUCCEEDED:
        return None
    return Verdict(
        reason=Reason.NO_RESULT,
        message=f"{describe_node(evidence)} ended with exit 0 but left no result",
    )


def unexplained(evidence: Evidence) -> Verdict | None:
    """Fallback: no other rule matched."""
    detail = extract_last_line(evidence.message) or evidence.reason or "no message"
    return Verdict(
        reason=Reason.UNEXPLAINED,
        message=f"{describe_node(evidence)} failed with exit {evidence.exit_code}: {detail}",
    )


RULES: tuple[Rule, ...] = (
    disrupted,
    evicted,
    host_out_of_memory,
    rejected_by_kubelet,
    kubernetes_node_restarted,
    container_not_started,
    user_error,
    cuda_out_of_memory,
    deleted,
    rendezvous_failed,
    storage_fault,
    hang,
    matches_error_pattern,
    victim,
    bus_error,
    killed,
    stopped,
    hub_unavailable,
    launcher_failed,
    raised,
    container_killed,
    no_result,
    unexplained,
)

_LAST = datetime.max.replace(tzinfo=UTC)


def judge(nodes: Iterable[Evidence]) -> Verdict | None:
    """Return the verdict on the earliest failure that is no victim; None if no node failed."""
    verdicts = [judge_node(node) for node in nodes if not _has_succeeded(node)]
    if not verdicts:
        return None
    return min(verdicts, key=_build_sort_key)


def select_most_relevant(nodes: tuple[Evidence, ...], *, limit: int) -> tuple[Evidence, ...]:
    """Return the evidence of at most `limit` nodes: those that judge prefers, ordered by node rank."""
    if len(nodes) <= limit:
        return nodes
    by_precedence = sorted(nodes, key=lambda node: (_has_succeeded(node), _build_sort_key(judge_node(node))))
    return tuple(sorted(by_precedence[:limit], key=lambda node: node.node_rank))


def judge_node(evidence: Evidence) -> Verdict:
    """Return the verdict of the first rule that matches; `unexplained` matches any evidence."""
    for rule in RULES:
        verdict = rule(evidence)
        if verdict is not None:
            return replace(verdict, evidence=evidence)
    raise AssertionError("unexplained matches everything")


def _has_succeeded(evidence: Evidence) -> bool:
    return evidence.outcome == Outcome.SUCCEEDED and evidence.exit_code == 0


def _build_sort_key(verdict: Verdict) -> tuple[bool, bool, datetime, int]:
    """Return the sort key of root causes: victims last, then stopped nodes, then by time."""
    evidence = verdict.evidence
    assert evidence is not None
    was_stopped = verdict.reason is Reason.STOPPED
    return verdict.victim, was_stopped, evidence.finished_at or _LAST, evidence.node_rank
