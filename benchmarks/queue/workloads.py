"""Reads the GPUs that a Workload of Kueue reserves."""

from __future__ import annotations

from typing import Any

from benchmarks.queue.job_plans import GPU
from finetune_api.v1alpha1.quantity import parse_quantity
from finetune_operator.observation.read_evidence import find_condition

RawBody = dict[str, Any]


def get_job_name(workload_name: str) -> str:
    """Return the job of a Workload, whose name is that of the job with a part of its uid."""
    return workload_name.rpartition("-")[0]


def is_true(workload: RawBody, condition_type: str) -> bool:
    return find_condition(workload.get("status") or {}, condition_type).get("status") == "True"


def get_reserved_gpus(workload: RawBody) -> int:
    """Return the GPUs of the quota that the Workload holds, without those of pods that have succeeded."""
    status = workload.get("status") or {}
    if is_true(workload, "Finished") or not is_true(workload, "QuotaReserved"):
        return 0
    reclaimable = {entry["name"]: entry["count"] for entry in status.get("reclaimablePods") or ()}
    gpus = 0
    for assignment in (status.get("admission") or {}).get("podSetAssignments", ()):
        total = int(parse_quantity(assignment.get("resourceUsage", {}).get(GPU, "0")))
        count = assignment["count"]
        gpus += total * (count - reclaimable.get(assignment["name"], 0)) // count
    return gpus


def get_eviction(workload: RawBody) -> tuple[str, str] | None:
    """Return reason and time of the last eviction; None if the Workload is not evicted."""
    condition = find_condition(workload.get("status") or {}, "Evicted")
    if condition.get("status") != "True":
        return None
    return condition.get("reason", ""), condition.get("lastTransitionTime", "")
