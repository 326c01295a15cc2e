"""Simulated ClusterQueue of Kueue, which admits Workloads while its quota has room and preempts lower priorities.

The order is best-effort FIFO: by priority, then by age; a Workload that does not fit does not block smaller ones.
"""

from finetune_operator import names
from testing.simulator.world.apiserver import ObjectKey, RawBody, SimulatedApiServer

KUEUE = "kueue"  # actor of the commits
QUOTA_RESERVED, EVICTED, FINISHED = "QuotaReserved", "Evicted", "Finished"
WAITING_FOR_REPLACEMENT = "WaitingForReplacementPods"
PREEMPTED, DEACTIVATED = "Preempted", "Deactivated"
PRIORITIES = {"": 0, "low": 100, "high": 1000}  # by name of the WorkloadPriorityClass


class ClusterQueue:
    """A quota in pods, which all jobs of the cluster share; the Workloads in the API server contain its whole state."""

    def __init__(self, server: SimulatedApiServer, *, quota: int) -> None:
        self.quota = quota
        self.preemptors: dict[str, list[str]] = {}  # uids of the preemptors by uid of the preempted Workload
        self._server = server

    def list_workloads(self) -> list[tuple[ObjectKey, RawBody]]:
        """Return the Workloads, oldest first."""
        return sorted(self._server.list_objects(names.WORKLOAD_KIND), key=lambda item: item[1]["metadata"]["uid"])

    def compute_usage(self) -> int:
        """Return the number of pods for which quota is reserved."""
        return sum(count_reserved_pods(workload) for _, workload in self.list_workloads())

    def schedule(self) -> None:
        """Admit the waiting Workloads that fit, and preempt Workloads of lower priority for those that do not."""
        waiting = [(key, workload) for key, workload in self.list_workloads() if is_admissible(workload)]
        for key, workload in sorted(waiting, key=lambda item: -item[1]["spec"]["priority"]):
            missing = count_pods(workload) - (self.quota - self.compute_usage())
            if missing <= 0:
                self._admit(key)
            elif self._preempt(workload, missing):
                return  # the room of the preempted Workloads is for this one
            else:
                message = f"couldn't assign flavors to pod set main: insufficient unused quota, {missing} more needed"
                self.set_condition(key, QUOTA_RESERVED, value=False, reason="Pending", message=message)

    def evict(self, key: ObjectKey, reason: str, message: str) -> None:
        """Evict an admitted Workload; its quota is returned once its pods have stopped."""
        workload = self._server.get(key)
        if workload is not None and has_condition(workload, QUOTA_RESERVED):
            self.set_condition(key, EVICTED, value=True, reason=reason, message=message)

    def release_quota(self, key: ObjectKey, message: str) -> None:
        """Return the quota of a Workload."""
        self.set_condition(key, "Admitted", value=False, reason="NoReservation", message=message)
        self.set_condition(key, QUOTA_RESERVED, value=False, reason="Pending", message=message)

    def set_condition(self, key: ObjectKey, name: str, *, value: bool, reason: str, message: str = "") -> None:
        """Set a condition of a Workload."""
        workload = self._server.get(key)
        if workload is None:
            return
        condition = {"type": name, "status": str(value), "reason": reason, "message": message}
        status = workload.get("status", {})
        others = [other for other in status.get("conditions", ()) if other["type"] != name]
        if condition not in status.get("conditions", ()):
            self._server.replace_fields(key, actor=KUEUE, status={**status, "conditions": [*others, condition]})

    def _admit(self, key: ObjectKey) -> None:
        self.set_condition(key, EVICTED, value=False, reason=QUOTA_RESERVED, message="Previously: evicted")
        self.set_condition(
            key, QUOTA_RESERVED, value=True, reason=QUOTA_RESERVED, message="Quota reserved in ClusterQueue gpus"
        )
        self.set_condition(key, "Admitted", value=True, reason="Admitted", message="The workload is admitted")

    def _preempt(self, preemptor: RawBody, missing: int) -> bool:
        """Evict enough Workloads of lower priority, those that are already evicted and the newest ones first."""
        candidates = [
            (key, workload)
            for key, workload in self.list_workloads()
            if count_reserved_pods(workload) and workload["spec"]["priority"] < preemptor["spec"]["priority"]
        ]
        candidates.sort(key=lambda item: item[1]["metadata"]["uid"], reverse=True)
        candidates.sort(key=lambda item: (not has_condition(item[1], EVICTED), item[1]["spec"]["priority"]))
        if sum(count_reserved_pods(workload) for _, workload in candidates) < missing:
            return False
        uid = preemptor["metadata"]["uid"]
        message = f"Preempted to accommodate a workload (UID: {uid}, JobUID: UNKNOWN) due to prioritization"
        for key, workload in candidates:
            if missing > 0 and not has_condition(workload, EVICTED):
                self.preemptors.setdefault(workload["metadata"]["uid"], []).append(uid)
                self.evict(key, PREEMPTED, message)
            missing -= count_reserved_pods(workload)
        return True


def has_condition(workload: RawBody, name: str) -> bool:
    """Return whether a condition of the Workload is True."""
    return any(c["type"] == name and c["status"] == "True" for c in workload.get("status", {}).get("conditions", ()))


def is_admissible(workload: RawBody) -> bool:
    """Return whether the Workload is in the queue, neither admitted nor inactive nor short of pods."""
    is_waiting = not any(has_condition(workload, name) for name in (QUOTA_RESERVED, FINISHED, WAITING_FOR_REPLACEMENT))
    return is_waiting and workload["spec"]["active"] and "deletionTimestamp" not in workload["metadata"]


def count_pods(workload: RawBody) -> int:
    """Return the number of pods of the Workload that have not succeeded."""
    count = sum(pod_set["count"] for pod_set in workload["spec"]["podSets"])
    return int(count - workload.get("status", {}).get("reclaimablePods", 0))


def count_reserved_pods(workload: RawBody) -> int:
    """Return the number of pods for which the Workload holds quota."""
    return count_pods(workload) if has_condition(workload, QUOTA_RESERVED) else 0
