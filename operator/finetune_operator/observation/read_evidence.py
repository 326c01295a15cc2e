"""Reads the evidence of one node from its pod; failures.merge_evidence stores it in `attempts[].evidence`."""

import re
from datetime import UTC, datetime

from finetune_api.bounded_text import measure_json_bytes, truncate_text, truncate_text_start
from finetune_api.termination import Termination
from finetune_api.v1alpha1.status import EVIDENCE_MESSAGE_BYTES, Evidence
from finetune_operator.observation.ownership import RawBody, parse_time
from finetune_supervisor.error_text import MAX_LINE_CHARACTERS, MAX_MESSAGE_CHARACTERS, select_line

# condition message of Kueue; an unknown uid is UNKNOWN, and older releases do not add the uid of the job
_PREEMPTOR = re.compile(r"accommodate a workload \(UID: ([0-9a-f-]{8,63})(?:, JobUID: ([0-9a-f-]{8,63}))?")


def read_evidence(
    pod: RawBody, terminated_state: RawBody, termination: Termination | None, *, node_rank: int, is_tombstone: bool
) -> Evidence:
    """Read the evidence of a node from pod status, terminated container state and termination message."""
    status = pod.get("status") or {}
    progress = termination.progress if termination else None
    # Kubernetes sets DisruptionTarget, Kueue sets TerminationTarget (decisions/217)
    disruption = _find_true_condition(status, "DisruptionTarget") or _find_true_condition(status, "TerminationTarget")
    return Evidence(
        node_rank=node_rank,
        pod_name=pod["metadata"]["name"],
        k8s_node=(pod.get("spec") or {}).get("nodeName", ""),
        ended=is_tombstone or bool(terminated_state) or status.get("phase") in ("Succeeded", "Failed"),
        # the reason of the pod (Evicted, DeadlineExceeded) is more specific than the reason Error of the container
        reason=status.get("reason") or terminated_state.get("reason", ""),
        disruption=disruption.get("reason", ""),
        preemptor=_find_preemptor(disruption.get("message") or ""),
        outcome=termination.outcome if termination else "",
        error_type=termination.error_type if termination else "",
        category=termination.category if termination else "",
        victim=termination.victim if termination else False,
        exit_code=terminated_state.get("exitCode"),
        rank=termination.rank if termination else None,
        signal=termination.signal if termination else terminated_state.get("signal"),
        message=_select_message(status, disruption, terminated_state, termination),
        # lines of a program prove no progress: they may count anything (decisions/311)
        last_step=progress.step if progress and not progress.from_log else None,
        per_device_train_batch_size=progress.per_device_train_batch_size if progress else None,
        finished_at=_select_finish_time(terminated_state, termination),
    )


def _find_preemptor(condition_message: str) -> str:
    """Return the workload, and its job if known, that the message of a Kueue condition names as preemptor."""
    match = _PREEMPTOR.search(condition_message)
    if match is None:
        return ""
    return f"workload {match[1]} of job {match[2]}" if match[2] else f"workload {match[1]}"


def _select_message(
    status: RawBody, disruption: RawBody, terminated_state: RawBody, termination: Termination | None
) -> str:
    """Return the most specific message; a termination message keeps its last line, a log its end."""
    if termination:
        return _shorten(termination.message)
    text: str = status.get("message") or disruption.get("message") or terminated_state.get("message") or ""
    return truncate_text_start(text.strip()[-MAX_MESSAGE_CHARACTERS:], EVIDENCE_MESSAGE_BYTES)


def _shorten(message: str) -> str:
    """Return the message within the limits of the status; a longer one loses what precedes the displayed line."""
    if truncate_text(message[:MAX_MESSAGE_CHARACTERS], EVIDENCE_MESSAGE_BYTES) == message:
        return message
    shown = truncate_text(select_line(message)[:MAX_LINE_CHARACTERS], EVIDENCE_MESSAGE_BYTES // 2)
    start = message[: MAX_MESSAGE_CHARACTERS - len(shown) - 1]
    return f"{truncate_text(start, EVIDENCE_MESSAGE_BYTES - measure_json_bytes(shown) - 2)}\n{shown}"


def _select_finish_time(terminated_state: RawBody, termination: Termination | None) -> datetime | None:
    """Return the finish time reported by the supervisor, otherwise finishedAt of the container.

    finishedAt has a resolution of one second, which is too coarse to find the first failure.
    """
    if termination and termination.final and termination.time is not None:
        return datetime.fromtimestamp(termination.time, UTC)
    return parse_time(terminated_state.get("finishedAt"))


def find_condition(status: RawBody, condition_type: str) -> RawBody:
    """Return the condition of this type in the status of a pod, or an empty dict."""
    conditions = status.get("conditions") or []
    return next((condition for condition in conditions if condition.get("type") == condition_type), {})


def _find_true_condition(status: RawBody, condition_type: str) -> RawBody:
    condition = find_condition(status, condition_type)
    return condition if condition.get("status") == "True" else {}
