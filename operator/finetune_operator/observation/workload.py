"""Parses the Workload by which Kueue admits the pods of a job, and its position in the queue.

Source of the messages: Kueue 0.19.2, pkg/scheduler and pkg/cache/scheduler.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from finetune_operator.observation.ownership import RawBody
from finetune_operator.observation.read_evidence import find_condition

GATED = "SchedulingGated"  # reason of the condition PodScheduled of a pod that Kueue has not admitted
MAX_MESSAGE = 4096  # only the beginning of a longer message is examined

# The first pattern that matches explains the wait, by its last match, because Kueue appends the reason of each flavor.
_EXPLANATIONS: tuple[tuple[re.Pattern[str], str], ...] = (
    (
        re.compile(r"[Pp]ending the preemption of (\d+) workload"),
        r"it waits until preempted jobs have stopped (\1)",
    ),
    (
        re.compile(r"insufficient unused quota for (\S+) in flavor ([^\s,]+), ([^\s,;]+) more needed"),
        r"\3 more \1 must become free in flavor \2",
    ),
    (
        re.compile(
            r"insufficient quota for (\S+) in flavor ([^\s,]+), .{0,80}"
            r"current podset request \(([^)]+)\) > maximum capacity \(([^)]+)\)"
        ),
        r"it needs \3 \1 in flavor \2, of which the queue never has more than \4",
    ),
    (
        re.compile(r"topology \"([^\"]+)\" allows to fit only (\d+) out of (\d+) pod"),
        r"the largest domain of topology \1 has room for \2 of \3 pods",
    ),
    (re.compile(r"topology \"([^\"]+)\" doesn't allow to fit"), r"no domain of topology \1 has room for the pods"),
    (
        re.compile(r"waiting for all admitted workloads to be in PodsReady condition"),
        r"Kueue starts it once the pods of all admitted jobs are ready (waitForPodsReady)",
    ),
)
_EVICTIONS = {
    "PodsReadyTimeout": "its pods were not ready in time, so that Kueue queued it again",
    "AdmissionCheck": "an admission check ended its admission",
    "ClusterQueueStopped": "an administrator stopped the ClusterQueue",
    "LocalQueueStopped": "an administrator stopped the LocalQueue",
    "NodeFailures": "Kubernetes nodes failed, so that Kueue queued it again",
}


@dataclass(frozen=True)
class WorkloadObservation:
    """Why a Workload has no quota.

    `message` explains it, and is empty until Kueue has tried to admit the Workload. `position` is the number of
    Workloads that are ahead in the LocalQueue; None if Kueue does not report it.
    """

    message: str
    is_active: bool = True  # False after Kueue or an administrator has deactivated it
    requeue_at: str = ""  # RFC 3339 time until which Kueue does not consider it
    position: int | None = None
    is_finished: bool = False  # all pods of an earlier attempt have succeeded, so that Kueue admits no further ones


def observe_workload(body: RawBody, positions: Mapping[str, int]) -> WorkloadObservation:
    """Parse a Workload. `positions` contains those of the Workloads that wait in its LocalQueue, by name."""
    status, spec = body.get("status") or {}, body.get("spec") or {}
    evicted, quota = find_condition(status, "Evicted"), find_condition(status, "QuotaReserved")
    parts = []
    if evicted.get("status") == "True":
        parts.append(_explain_eviction(evicted))
    if quota.get("status") == "False":
        parts.append(explain_message(str(quota.get("message") or "")))
    requeue_at = (status.get("requeueState") or {}).get("requeueAt")
    return WorkloadObservation(
        "; ".join(dict.fromkeys(filter(None, parts))),
        is_active=spec.get("active", True) is not False,
        requeue_at=requeue_at if isinstance(requeue_at, str) else "",
        position=positions.get(body["metadata"]["name"]),
        is_finished=find_condition(status, "Finished").get("status") == "True",
    )


def explain_message(message: str) -> str:
    """Return Kueue's message in plain words, or the message itself if its form is unknown."""
    for pattern, explanation in _EXPLANATIONS:
        matches = list(pattern.finditer(message[:MAX_MESSAGE]))
        if matches:
            return matches[-1].expand(explanation)
    return message


def _explain_eviction(evicted: RawBody) -> str:
    reason, message = str(evicted.get("reason") or ""), str(evicted.get("message") or "")
    if reason == "Preempted":
        return ""  # the record of the last attempt names the preemptor
    return _EVICTIONS.get(reason, message)
