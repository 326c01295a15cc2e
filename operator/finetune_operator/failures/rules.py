"""Whose fault: an ordered tuple of rules over what the nodes left behind; the first that matches a node speaks for it.

The cause of an attempt's end is one node: those that only suffered from another's death are set aside first, then the
earliest decides.
"""

import signal as signals
from collections.abc import Callable, Iterable
from dataclasses import replace
from datetime import UTC, datetime

from finetune_api.termination import USER_ERRORS, Outcome
from finetune_api.v1alpha1.reasons import Reason
from finetune_api.v1alpha1.status import Evidence
from finetune_operator.failures.container_start_rules import not_admitted, not_started, under_pressure
from finetune_operator.failures.error_patterns import told_by_text
from finetune_operator.failures.verdict import Verdict, first_line, where

Rule = Callable[[Evidence], Verdict | None]

PREEMPTIONS = {
    "PreemptionByScheduler": "preempted by a pod of higher priority",
    "EvictionByEvictionAPI": "drained from its Kubernetes node",
    "TerminationByKubelet": "ended by its kubelet",
    "DeletionByTaintManager": "its Kubernetes node was lost",
    "DeletionByPodGC": "its Kubernetes node is gone",
}
DONE_TO_PODS = {
    "Relabelled": "lost its labels, so that nobody can watch it",
    "Restarted": "was restarted in place, as a kubelet does whose pod was edited",
}
LOST = frozenset({"DeletionByTaintManager", "DeletionByPodGC"})


def disrupted(evidence: Evidence) -> Verdict | None:
    """The cluster took the pod away: not the job's fault, and not counted against it."""
    if evidence.disruption not in PREEMPTIONS:
        return None
    return Verdict(
        reason=Reason.NODE_LOST if evidence.disruption in LOST else Reason.PREEMPTED,
        message=f"{where(evidence)}: {PREEMPTIONS[evidence.disruption]}",
    )


def evicted(evidence: Evidence) -> Verdict | None:
    """Evicted without a disruption: the pod passed its own storage limits, and would again."""
    if evidence.reason != "Evicted" or under_pressure(evidence):
        return None
    return Verdict(
        reason=Reason.EVICTED,
        message=f"{where(evidence)}: {first_line(evidence.message)}; raise ephemeral-storage in resources.limits",
    )


def host_out_of_memory(evidence: Evidence) -> Verdict | None:
    """The kernel killed a process of the container, whatever the exit code was: the same would run out again."""
    if evidence.reason != "OOMKilled" or evidence.outcome == Outcome.SUCCEEDED:
        return None
    return Verdict(
        reason=Reason.HOST_OUT_OF_MEMORY,
        message=f"{where(evidence)} ran out of host memory at step {evidence.last_step or 0}",
    )


def machine_restarted(evidence: Evidence) -> Verdict | None:
    """The kubelet, or its runtime, came back and knows nothing of the container's end: the machine lost power."""
    by_runtime = evidence.reason == "Unknown" and evidence.exit_code == 255
    if not by_runtime and evidence.reason != "ContainerStatusUnknown":
        return None
    return Verdict(
        reason=Reason.NODE_LOST,
        message=f"{where(evidence)}: the container is gone without a trace; its Kubernetes node was restarted",
    )


def user_error(evidence: Evidence) -> Verdict | None:
    """The trainer named what is wrong with the spec, the rows or the storage."""
    if evidence.error_type not in USER_ERRORS:
        return None
    return Verdict(
        reason=Reason(evidence.error_type),
        message=f"{where(evidence)}: {first_line(evidence.message)}",
    )


def cuda_out_of_memory(evidence: Evidence) -> Verdict | None:
    """The GPU's memory ran out: the same batch would run out again, a smaller one may not."""
    typed = evidence.error_type == Reason.CUDA_OUT_OF_MEMORY
    if not typed and evidence.error_type != "OutOfMemoryError" and "CUDA out of memory" not in evidence.message:
        return None
    said = first_line(evidence.message) if typed else f"ran out of GPU memory at step {evidence.last_step or 0}"
    return Verdict(
        reason=Reason.CUDA_OUT_OF_MEMORY,
        message=f"{where(evidence)} {said}",
    )


def deleted(evidence: Evidence) -> Verdict | None:
    """Somebody deleted the pod, or it vanished with its node."""
    if not evidence.deleted:
        return None
    pod = f"pod {evidence.pod_name}" if evidence.pod_name else "its pod"
    return Verdict(
        reason=Reason.POD_DELETED,
        message=f"{where(evidence)}: {pod} {DONE_TO_PODS.get(evidence.reason, 'was deleted')}",
    )


def no_name(evidence: Evidence) -> Verdict | None:
    """The name of rank 0 did not appear in DNS, or nobody answered there."""
    if evidence.error_type not in ("DnsTimeout", "RendezvousTimeoutError", "RendezvousConnectionError"):
        return None
    return Verdict(
        reason=Reason.RENDEZVOUS_TIMEOUT,
        message=f"{where(evidence)}: {first_line(evidence.message)}",
        victim=True,
    )


def storage_fault(evidence: Evidence) -> Verdict | None:
    """A file system failed under the trainer, whatever its words make of what could not be read."""
    if evidence.error_type != Reason.STORAGE_FAULT:
        return None
    return Verdict(
        reason=Reason.STORAGE_FAULT,
        message=f"{where(evidence)}: {first_line(evidence.message)}",
    )


def hang(evidence: Evidence) -> Verdict | None:
    """A rank gave no sign of life for too long; its supervisor says of which one, and whether it only waited."""
    if evidence.error_type != Reason.HANG:
        return None
    return Verdict(
        reason=Reason.HANG,
        message=f"{where(evidence.model_copy(update={'rank': None}))}: {first_line(evidence.message)}",
        victim=evidence.victim,
    )


def victim(evidence: Evidence) -> Verdict | None:
    """Its peers went away; it only says so, and its supervisor knows such words."""
    if not evidence.victim:
        return None
    return Verdict(
        reason=Reason.PEER_LOST,
        message=f"{where(evidence)} lost its peers: {evidence.error_type}: {first_line(evidence.message)}",
        victim=True,
    )


def bus_error(evidence: Evidence) -> Verdict | None:
    """A page of a memory-mapped file could not be had, which is how most often a full /dev/shm ends a rank."""
    if evidence.signal != signals.SIGBUS or evidence.outcome == Outcome.STOPPED:
        return None
    return Verdict(
        reason=Reason.SHARED_MEMORY_EXHAUSTED,
        message=f"{where(evidence)} was ended by SIGBUS, as by a full /dev/shm",
    )


def killed(evidence: Evidence) -> Verdict | None:
    """A rank was ended by a signal that nobody here sent."""
    if evidence.signal is None or evidence.outcome == Outcome.STOPPED:
        return None
    try:
        name = signals.Signals(evidence.signal).name
    except ValueError:
        name = f"signal {evidence.signal}"
    crashed = name in ("SIGSEGV", "SIGABRT", "SIGFPE", "SIGILL")
    return Verdict(
        reason=Reason.RANK_CRASHED if crashed else Reason.RANK_KILLED,
        message=f"{where(evidence)} was ended by {name}",
    )


def stopped(evidence: Evidence) -> Verdict | None:
    """It was asked to stop and did; somebody else is the cause."""
    if evidence.outcome != Outcome.STOPPED and evidence.ended:
        return None
    return Verdict(
        reason=Reason.STOPPED,
        message=f"{where(evidence)} was stopped",
        victim=True,
    )


def hub_unavailable(evidence: Evidence) -> Verdict | None:
    """The Hub did not answer, or not yet: it may the next time."""
    if evidence.error_type != "HubUnavailable":
        return None
    return Verdict(
        reason=Reason.HUB_UNAVAILABLE,
        message=f"{where(evidence)}: {first_line(evidence.message)}",
    )


def launcher_failed(evidence: Evidence) -> Verdict | None:
    """A launcher or a rank ended without an exception that anybody recorded."""
    if evidence.error_type not in ("LauncherFailed", "RankExited", "UnknownError"):
        return None
    return Verdict(
        reason=Reason.UNEXPLAINED,
        message=f"{where(evidence)}: {evidence.error_type}: {first_line(evidence.message)}",
    )


def raised(evidence: Evidence) -> Verdict | None:
    """A rank raised an exception that nobody foresaw: the code or the rows, and again the same next time."""
    if evidence.outcome != Outcome.FAILED or not evidence.error_type:
        return None
    return Verdict(
        reason=Reason.USER_CODE_ERROR,
        message=f"{where(evidence)}: {evidence.error_type}: {first_line(evidence.message)}",
    )


def container_killed(evidence: Evidence) -> Verdict | None:
    """The whole container was ended from outside: its supervisor had no time for last words."""
    if evidence.exit_code not in (137, 143):
        return None
    return Verdict(
        reason=Reason.CONTAINER_KILLED,
        message=f"{where(evidence)}: the container was killed (exit {evidence.exit_code})",
    )


def no_result(evidence: Evidence) -> Verdict | None:
    """Exit 0 without the success marker is no success."""
    if evidence.exit_code != 0 or evidence.outcome == Outcome.SUCCEEDED:
        return None
    return Verdict(
        reason=Reason.NO_RESULT,
        message=f"{where(evidence)} ended with exit 0 but left no result",
    )


def unexplained(evidence: Evidence) -> Verdict | None:
    """Nothing else speaks."""
    said = first_line(evidence.message) or evidence.reason or "no message"
    return Verdict(
        reason=Reason.UNEXPLAINED,
        message=f"{where(evidence)} failed with exit {evidence.exit_code}: {said}",
    )


RULES: tuple[Rule, ...] = (
    disrupted,
    evicted,
    host_out_of_memory,
    not_admitted,
    machine_restarted,
    not_started,
    user_error,
    cuda_out_of_memory,
    deleted,
    no_name,
    storage_fault,
    hang,
    told_by_text,
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

_LATER = datetime.max.replace(tzinfo=UTC)


def judge(nodes: Iterable[Evidence]) -> Verdict | None:
    """The verdict on an attempt: the earliest cause among those who are no victims; None if nobody failed."""
    verdicts = [judge_node(node) for node in nodes if not _well(node)]
    if not verdicts:
        return None
    return min(verdicts, key=_precedence)


def most_telling(nodes: tuple[Evidence, ...], *, limit: int) -> tuple[Evidence, ...]:
    """Of at most so many nodes, those that judge looks at first; in their order."""
    if len(nodes) <= limit:
        return nodes
    by_weight = sorted(nodes, key=lambda node: (_well(node), _precedence(judge_node(node))))
    return tuple(sorted(by_weight[:limit], key=lambda node: node.node_rank))


def judge_node(evidence: Evidence) -> Verdict:
    """The first rule that matches; `unexplained` matches all."""
    for rule in RULES:
        verdict = rule(evidence)
        if verdict is not None:
            return replace(verdict, evidence=evidence)
    raise AssertionError("unexplained matches everything")


def _well(evidence: Evidence) -> bool:
    return evidence.outcome == Outcome.SUCCEEDED and evidence.exit_code == 0


def _precedence(verdict: Verdict) -> tuple[bool, bool, datetime, int]:
    evidence = verdict.evidence
    assert evidence is not None
    bystander = verdict.reason is Reason.STOPPED
    return verdict.victim, bystander, evidence.finished_at or _LATER, evidence.node_rank
