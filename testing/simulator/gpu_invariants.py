"""Invariants of GPU-seconds: their sum is the time for which pods were assigned to nodes, multiplied by their GPUs."""

from collections import defaultdict
from datetime import datetime, timedelta

from finetune_api.v1alpha1.status import AttemptRecord
from finetune_operator import names
from finetune_operator.observation.ownership import get_controller_uid
from testing.simulator.world.apiserver import Change, RawBody
from testing.simulator.world.network import Connection
from testing.simulator.world.parsed_objects import parse_status
from testing.simulator.world.world import GPUS_PER_NODE, World

Assignment = tuple[str, datetime]  # pod uid, time of its assignment to a Kubernetes node
ROUNDING_SECONDS = 1.0  # of one entry of the status, or of the time in a condition


class GpuMonitor:
    """Compares the GPU-seconds of each job that holds no GPUs with all its attempts, and these with their pods."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._records: defaultdict[str, dict[int, AttemptRecord]] = defaultdict(dict)  # by job uid, then attempt
        self._assignments: defaultdict[tuple[str, str], list[Assignment]] = defaultdict(list)  # by job uid and attempt
        self._was_clock_wrong = False
        self._may_have_missed_pods = False
        world.server.listeners.append(self._on_commit)

    def _on_commit(self, change: Change) -> None:
        self._may_have_missed_pods |= any(_may_miss_pods(operator.connection) for operator in self._world.operators)
        if change.kind == "Pod":
            self._record_assignment(change)
        is_status_write = change.kind == names.FINETUNEJOB_KIND and change.actor.startswith("operator")
        if is_status_write and change.new_body and change.body["metadata"]["uid"] not in self._world.poisoned_uids:
            self._was_clock_wrong |= any(operator.manager.clock_offset for operator in self._world.operators)
            self._check_job(change.new_body)

    def _record_assignment(self, change: Change) -> None:
        was_assigned = change.old_body is not None and change.old_body["spec"].get("nodeName")
        if was_assigned or not change.body["spec"].get("nodeName"):
            return
        metadata = change.body["metadata"]
        attempt = metadata.get("labels", {}).get(names.ATTEMPT, "")
        key = get_controller_uid(change.body) or "", attempt
        self._assignments[key].append((metadata["uid"], self._world.server.now()))

    def _check_job(self, job: RawBody) -> None:
        status, uid, name = parse_status(job), job["metadata"]["uid"], job["metadata"]["name"]
        known = self._records[uid]
        for record in status.attempts:
            if record.end_time is not None and (record.attempt not in known or known[record.attempt].end_time is None):
                self._check_attempt(uid, name, record)
            known[record.attempt] = record
        if any(record.end_time is None for record in known.values()):
            return
        held = sum((_get_held_time(record) for record in known.values()), timedelta()).total_seconds()
        counted = sum(entry.seconds for entry in status.gpu_seconds)
        if abs(held - counted) > ROUNDING_SECONDS * (1 + len(status.gpu_seconds) + len(status.dropped_gpu_seconds)):
            self._world.report(f"{name} held its GPUs for {held} GPU-seconds, but its status contains {counted}")

    def _check_attempt(self, uid: str, name: str, record: AttemptRecord) -> None:
        """Compare the held time of an attempt with its pods, if none of them was replaced and the clock was right."""
        pods = self._assignments[uid, str(record.attempt)]
        if self._was_clock_wrong or record.end_time is None or len(pods) > (record.num_nodes or 0):
            return
        expected = GPUS_PER_NODE * sum(max(0.0, (record.end_time - at).total_seconds()) for _, at in pods)
        held = _get_held_time(record).total_seconds()
        tolerance = len(pods) * GPUS_PER_NODE * ROUNDING_SECONDS
        # an operator that was restarted may never have observed pods that are gone
        has_observed_all = not self._may_have_missed_pods and len(self._world.operators) == self._world.options.replicas
        if held - expected > tolerance or (expected - held > tolerance and has_observed_all):
            self._world.report(
                f"the pods of attempt {record.attempt} of {name} were assigned for {expected} GPU-seconds, but its"
                f" record contains {held}"
            )


def _may_miss_pods(connection: Connection) -> bool:
    """Return whether pods may be assigned and deleted before the operator receives an event of them."""
    faults = connection.faults
    return connection.is_partitioned or faults.delayed_events > 0 or faults.broken_watches > 0


def _get_held_time(record: AttemptRecord) -> timedelta:
    """Return the GPU time of an ended attempt, however it is divided into phases."""
    if not record.gpus or record.allocated_time is None or record.end_time is None:
        return timedelta()
    return record.gpus * max(timedelta(), record.end_time - record.allocated_time)
