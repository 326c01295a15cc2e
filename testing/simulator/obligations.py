"""Obligations of the operator towards every job, even one that it cannot reconcile: suspend, cancel, deadline, TTL."""

from collections import defaultdict
from datetime import datetime, timedelta
from typing import Any

from finetune_operator.observation.ownership import parse_time
from testing.simulator.world.apiserver import TERMINAL
from testing.simulator.world.job import SimulatedJob
from testing.simulator.world.parsed_objects import observe_pod

# Maximum delay of a leading operator under network faults; its clock ignores jumps for two minutes.
REACTION_SECONDS = 270.0


class ObligationMonitor:
    """Measures for how long a leading operator has not fulfilled each obligation towards one job."""

    def __init__(self, job: SimulatedJob) -> None:
        self._job = job
        self._overdue_seconds: defaultdict[str, float] = defaultdict(float)

    def check(self, seconds: float) -> None:
        """Check all obligations; called every `seconds`."""
        if not any(operator.can_act for operator in self._job.world.operators):
            return
        for obligation, is_overdue in (
            ("release the GPUs of the suspended job", self._is_suspended() and self._has_running_pods()),
            ("release the GPUs of the finished job", self._is_finished() and self._has_running_pods()),
            ("stop the pods of the cancelled job", self._is_cancelled() and self._has_running_pods()),
            ("end the cancelled job", self._is_cancelled() and not self._has_lost_pods()),
            (
                "stop the pods of the job at its active deadline",
                self._has_missed_deadline() and self._has_running_pods(),
            ),
            ("end the job at its active deadline", self._has_missed_deadline() and not self._has_lost_pods()),
            ("delete the job after its TTL", self._has_missed_ttl()),
        ):
            self._overdue_seconds[obligation] = self._overdue_seconds[obligation] + seconds if is_overdue else 0.0
            if self._overdue_seconds[obligation] > REACTION_SECONDS:
                self._job.world.report(f"{self._job}: no operator has acted for {REACTION_SECONDS} s to {obligation}")

    @property
    def _spec(self) -> dict[str, Any]:
        spec: dict[str, Any] = (self._job.body or {}).get("spec", {})
        return spec

    def _is_suspended(self) -> bool:
        return self._spec.get("suspend") is True

    def _is_cancelled(self) -> bool:
        """Return whether the job has been cancelled and has not ended."""
        return self._spec.get("cancel") is True and not self._is_finished() and not self._is_being_deleted()

    def _is_finished(self) -> bool:
        return "completionTime" in self._job.status

    def _has_running_pods(self) -> bool:
        """Return whether a pod of the job that the operator can observe runs and is not being deleted."""
        for _, pod in self._job.list_pods():
            is_active = pod["status"].get("phase") not in TERMINAL and "deletionTimestamp" not in pod["metadata"]
            if not is_active or self._job.world.is_lost(pod):
                continue
            node = observe_pod(pod)
            if node is not None and not node.is_relabelled:
                return True
        return False

    def _has_lost_pods(self) -> bool:
        """Return whether a pod is on a lost Kubernetes node, whose end the operator has to wait for."""
        return any(self._job.world.is_lost(pod) for _, pod in self._job.list_pods())

    def _has_missed_deadline(self) -> bool:
        limit, status = self._spec.get("activeDeadlineSeconds"), self._job.status
        if not isinstance(limit, int) or self._is_suspended() or self._is_finished() or self._is_being_deleted():
            return False
        seconds = limit + status.get("suspendedSeconds", 0)
        return self._has_passed(status.get("startTime"), seconds)

    def _has_missed_ttl(self) -> bool:
        ttl = self._spec.get("ttlSecondsAfterFinished")
        if not isinstance(ttl, int) or self._is_being_deleted():
            return False
        return self._has_passed(self._job.status.get("completionTime"), ttl)

    def _is_being_deleted(self) -> bool:
        body = self._job.body
        return body is None or "deletionTimestamp" in body["metadata"]

    def _has_passed(self, text: str | None, seconds: float) -> bool:
        start: datetime | None = parse_time(text)
        return start is not None and self._job.world.server.now() > start + timedelta(seconds=seconds)
