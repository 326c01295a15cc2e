"""Safety invariants of one job, which must hold after every commit to the API server."""

from collections import Counter
from collections.abc import Iterator

from finetune_api.v1alpha1.job import RestartPolicy
from finetune_api.v1alpha1.reasons import Reason
from finetune_api.v1alpha1.status import AttemptRecord, AttemptState, Fault, JobStatus, RestartCounts
from finetune_operator import names
from finetune_operator.core.conditions import acknowledge_generation
from finetune_operator.observation.ownership import get_controller_uid
from finetune_operator.observation.pods import NodeObservation
from finetune_operator.plan.manifests import is_intact_headless_service
from testing.simulator.world.apiserver import Change, RawBody
from testing.simulator.world.job import SimulatedJob
from testing.simulator.world.node_controllers import FORCED_DELETION_ACTORS
from testing.simulator.world.parsed_objects import observe_pod, parse_status

NEXT_STATES = {
    AttemptState.STARTING: {"Starting", "Running", "Stopping", "Failed", "Succeeded"},
    AttemptState.RUNNING: {"Running", "Stopping", "Failed", "Succeeded"},
    AttemptState.STOPPING: {"Stopping", "Failed", "Stopped", "Succeeded"},
    AttemptState.STOPPED: {"Stopped"},
    AttemptState.SUCCEEDED: {"Succeeded"},
    AttemptState.FAILED: {"Failed"},
}


DEFAULT_STARTUP_DEADLINE_SECONDS = 600
REASONS_WITH_OWN_TIMEOUT = (Reason.IMAGE_PULL_FAILED, Reason.CONTAINER_CREATING)
ACTIVE_STATES = (AttemptState.STARTING, AttemptState.RUNNING)
OPERATOR_REACTION_SECONDS = 120.0  # maximum reaction time of a running operator under network faults


class JobMonitor:
    """Checks every commit and reports violations of the invariants of one job."""

    def __init__(self, job: SimulatedJob, *, has_split_brain: bool) -> None:
        self._job = job
        self._world = job.world
        self._has_split_brain = has_split_brain
        # uids of removed or relabelled pods that may still run
        self._removed_while_running: set[str] = set()
        self._confirmed_ended: set[str] = set()  # uids of terminated pods, even if their status changes later
        self._newest_pod_uids: dict[str, str] = {}  # pod name -> uid of the newest pod
        # ((job uid, attempt), seconds for which running nodes have waited for pending ones)
        self._idle_seconds: tuple[tuple[str, int | None], float] = (("", None), 0.0)
        self._seconds_without_service = 0.0  # counted only while an attempt is active
        job.world.server.listeners.append(self._on_commit)

    def report(self, message: str) -> None:
        """Record a violation of an invariant of this job."""
        self._world.report(f"{self._job}: {message}")

    def check_idle_nodes(self, seconds: float) -> None:
        """Check that running nodes release their GPUs if other nodes stay pending; called every `seconds`."""
        status, job = self._read_status(), self._job.body
        if job is None or status.waiting is None or status.waiting.reason in REASONS_WITH_OWN_TIMEOUT:
            self._idle_seconds = ("", None), 0.0
            return
        current_pods = [
            p for _, p in self._job.list_pods() if p["metadata"]["labels"].get(names.ATTEMPT) == str(status.attempt)
        ]
        has_running_nodes = any(
            "running" in _get_container_state(pod) and not self._world.is_lost(pod) for pod in current_pods
        )
        attempt = self._job.uid, status.attempt
        idle_seconds = self._idle_seconds[1] if self._idle_seconds[0] == attempt and has_running_nodes else 0.0
        self._idle_seconds = attempt, idle_seconds + seconds * self._can_operator_act()
        limit = job["spec"].get("startupDeadlineSeconds", DEFAULT_STARTUP_DEADLINE_SECONDS)
        if limit and idle_seconds > limit + OPERATOR_REACTION_SECONDS:
            self.report(f"nodes of attempt {status.attempt} waited {idle_seconds} s for others that do not start")

    def check_service(self, seconds: float) -> None:
        """Check that the Service of an active attempt is not missing for long; called every `seconds`."""
        status, job, service = self._read_status(), self._job.body, self._world.server.get(self._job.service_key)
        job_exists = job is not None and "deletionTimestamp" not in job["metadata"]
        attempt = status.attempts[-1] if status.attempts else None
        is_active = job_exists and attempt is not None and attempt.created and attempt.state in ACTIVE_STATES
        is_intact = service is not None and is_intact_headless_service(service, self._job.uid)
        if is_active and not is_intact:
            self._seconds_without_service += seconds * self._can_operator_act()
        else:
            self._seconds_without_service = 0.0
        if self._seconds_without_service > OPERATOR_REACTION_SECONDS:
            duration = self._seconds_without_service
            self.report(f"attempt {status.attempt} had no Service, or an edited one, for {duration} s")

    def _can_operator_act(self) -> bool:
        """Return whether an operator leads, can reach the API server and has a roughly correct clock."""
        offsets = (o.manager.clock_offset for o in self._world.operators if o.can_act)
        return any(abs(offset.total_seconds()) < OPERATOR_REACTION_SECONDS for offset in offsets)

    def _on_commit(self, change: Change) -> None:
        if change.body["metadata"]["namespace"] != self._job.key.namespace:
            return
        by_operator = change.actor.startswith("operator")
        if change.kind == "Pod":
            self._record_pod(change)
            if change.actor == "scheduler":
                self._check_placement(change)
            if by_operator and get_controller_uid(change.body) == self._job.uid:
                messages = (
                    self._check_created_pod(change) if change.old_body is None else self._check_deleted_pod(change)
                )
                for message in messages:
                    self.report(message)
        is_job = change.kind == names.FINETUNEJOB_KIND and change.body["metadata"]["name"] == self._job.key.name
        if is_job and by_operator and change.old_body and change.new_body:
            for message in self._check_status(change.old_body, change.new_body):
                self.report(message)

    def _record_pod(self, change: Change) -> None:
        metadata = change.body["metadata"]
        if (change.new_body is None and change.actor in ("user", *FORCED_DELETION_ACTORS)) or _has_changed_labels(
            change
        ):
            self._removed_while_running.add(metadata["uid"])
        if change.old_body is None:
            self._newest_pod_uids[metadata["name"]] = metadata["uid"]
        elif (pod := observe_pod(change.old_body)) and not pod.may_run(self._world.now()):
            self._confirmed_ended.add(pod.uid)

    def _check_placement(self, change: Change) -> None:
        """Check that no pod is assigned to a Kubernetes node that is avoided or whose GPU failed earlier."""
        pod, job = observe_pod(change.body), self._job.body
        if pod is None or job is None or get_controller_uid(change.body) != self._job.uid:
            return
        for record in self._read_status().attempts:
            if record.attempt == pod.attempt and pod.k8s_node in record.avoids:
                self.report(f"{pod.pod_name} was assigned to {pod.k8s_node}, which its attempt avoids")
            failed_before = record.attempt < pod.attempt and record.reason == Reason.GPU_HARDWARE
            avoids_failing_nodes = job["spec"].get("restartPolicy", {}).get("avoidFailingNodes", True)
            if avoids_failing_nodes and failed_before and record.k8s_node == pod.k8s_node:
                self.report(f"{pod.pod_name} was assigned to {pod.k8s_node}, whose GPU failed attempt {record.attempt}")

    def _read_status(self) -> JobStatus:
        return JobStatus() if self._job.body is None else parse_status(self._job.body)

    def _check_created_pod(self, change: Change) -> Iterator[str]:
        new_pod = observe_pod(change.body)
        assert new_pod is not None
        status = self._read_status()
        if self._job.body is not None and new_pod.attempt > (-1 if status.attempt is None else status.attempt):
            yield f"{new_pod.pod_name} was created before its attempt was in the status"
        if self._has_split_brain or self._job.body is None:
            return
        if status.attempt != new_pod.attempt or status.completion_time is not None:
            yield f"{new_pod.pod_name} was created while the status has attempt {status.attempt}"
        elif status.attempts[-1].state is not AttemptState.STARTING or status.attempts[-1].created:
            yield f"{new_pod.pod_name} was created although its attempt is {status.attempts[-1].state} and created"
        if not self._world.operator_clock_was_ahead:
            yield from self._check_older_attempts_ended(new_pod)

    def _check_older_attempts_ended(self, new_pod: NodeObservation) -> Iterator[str]:
        """Check that no pod of another attempt runs, except pods that the operator cannot observe."""
        for _, pod in self._job.list_pods():
            other = observe_pod(pod)
            if other is None or other.attempt == new_pod.attempt or other.uid in self._confirmed_ended:
                continue
            if _is_considered_running(other) and other.may_run(self._world.now()):
                yield f"{new_pod.pod_name} was created while {other.pod_name} may run"
        for _, pod in self._job.list_pods_of_all_uids():
            other = observe_pod(pod)
            # a create request of the previous job that was sent before its deletion may still take effect
            is_older = pod["metadata"]["creationTimestamp"] < self._job.creation_time
            is_predecessor = get_controller_uid(pod) != self._job.uid and is_older
            if other and is_predecessor and not other.is_relabelled and other.may_run(self._world.now()):
                yield f"{new_pod.pod_name} was created while a pod of the deleted job of the same name may run"
        for process in self._job.list_running_processes():
            _, k8s_node = self._world.k8s_nodes.processes[process.pod_uid]
            is_excused = k8s_node.loss_count or process.pod_uid in self._removed_while_running
            is_current_job = process.job_uid == self._job.uid
            if is_current_job and process.attempt != new_pod.attempt and not is_excused:
                yield f"{new_pod.pod_name} was created while attempt {process.attempt} runs on {k8s_node.name}"

    def _check_deleted_pod(self, change: Change) -> Iterator[str]:
        pod, status = observe_pod(change.body), self._read_status()
        if pod is None or pod.is_relabelled or self._has_split_brain or status.attempt is None or not self._job.body:
            return
        ended = status.completion_time is not None or status.attempts[-1].state in ("Stopping", "Stopped")
        if not ended and pod.attempt == status.attempt:
            yield f"{pod.pod_name} was deleted while the attempt state is {status.attempts[-1].state}"

    def _check_status(self, old_body: RawBody, updated_body: RawBody) -> Iterator[str]:
        before, after = parse_status(old_body), parse_status(updated_body)
        if before.completion_time is not None:
            if acknowledge_generation(before, after.observed_generation) != after:
                yield "the status changed after the end"
            return
        yield from self._check_attempts(before, after)
        yield from self._check_restart_counts(before, after, updated_body["spec"])
        yield from self._check_avoided_nodes(before, after)
        yield from self._check_repair(before, after)
        yield from self._check_conditions(after)

    def _check_attempts(self, old_status: JobStatus, new_status: JobStatus) -> Iterator[str]:
        first_attempt = old_status.attempt if old_status.attempt is not None else -1
        if new_status.attempt is None or new_status.attempt - first_attempt not in (0, 1):
            if new_status.attempt is not None or old_status.attempt is not None:
                yield f"the attempt went from {old_status.attempt} to {new_status.attempt}"
            return
        records = {record.attempt: record for record in new_status.attempts}
        for record in old_status.attempts:
            if updated := records.get(record.attempt):
                yield from self._check_record(record, updated, is_current=record.attempt >= first_attempt)
        if new_status.attempt > first_attempt >= 0:
            ended_record = records[first_attempt]
            if ended_record.state not in (AttemptState.FAILED, AttemptState.STOPPED):
                yield f"attempt {new_status.attempt} was started while attempt {first_attempt} is {ended_record.state}"
            if new_status.restarts - old_status.restarts != (ended_record.state is AttemptState.FAILED):
                change = f"{old_status.restarts} to {new_status.restarts}"
                yield f"restarts went from {change} after attempt {first_attempt} {ended_record.state}"

    def _check_record(self, record: AttemptRecord, updated_record: AttemptRecord, *, is_current: bool) -> Iterator[str]:
        is_cancelled = record.state is AttemptState.STOPPED and updated_record.reason == Reason.CANCELLED
        if updated_record.state not in NEXT_STATES[record.state] and not is_cancelled:
            yield f"attempt {record.attempt} went from {record.state} to {updated_record.state}"
        victims = {evidence.node_rank for evidence in updated_record.evidence if evidence.victim}
        is_victim_verdict = updated_record.reason == Reason.PEER_LOST or (
            updated_record.reason == Reason.HANG and updated_record.node_rank in victims
        )
        if (
            is_victim_verdict
            and updated_record.reason != record.reason
            and self._is_root_cause_observable(updated_record)
        ):
            yield f"the verdict on attempt {record.attempt} blames a victim: {updated_record.message}"
        never_created_ranks = {
            evidence.node_rank for evidence in updated_record.evidence if not evidence.pod_name and not evidence.deleted
        }
        if updated_record.reason == Reason.UNEXPLAINED and updated_record.node_rank in never_created_ranks:
            node_rank = updated_record.node_rank
            yield f"the verdict on attempt {record.attempt} blames node {node_rank}, which was never created"
        # downtime and lost steps are known once a later attempt trains
        later = {"downtime_seconds": record.downtime_seconds, "steps_lost": record.steps_lost}
        if not is_current and updated_record.model_copy(update=later) != record:
            yield f"the record of attempt {record.attempt} changed after its end"

    def _is_root_cause_observable(self, record: AttemptRecord) -> bool:
        """Return whether the operator has received, or can still receive, the failure report of the root cause."""
        cause = self._world.trainer.root_causes.get((self._job.uid, record.attempt))
        if cause is None or self._world.operator_clock_was_ahead:
            return False
        evidence = next((each for each in record.evidence if each.node_rank == cause.node_rank), None)
        if evidence and self._newest_pod_uids.get(evidence.pod_name, cause.pod_uid) != cause.pod_uid:
            return False  # the evidence comes from a pod that replaced the pod of the root cause
        if evidence and evidence.exit_code is not None:
            return not evidence.victim  # after a network fault, all nodes are victims
        pod = next((pod for _, pod in self._job.list_pods() if pod["metadata"]["uid"] == cause.pod_uid), None)
        return pod is not None and not self._world.is_lost(pod)

    def _check_restart_counts(self, old_status: JobStatus, new_status: JobStatus, spec: RawBody) -> Iterator[str]:
        """Check that every restart is counted once, within the limits.

        Repairs, incomplete gangs, and preemptions of a group or with a known preemptor are not counted.
        """
        if new_status.restarts == old_status.restarts:
            return
        ended, counts = new_status.attempts[-2], new_status.without_progress
        expected_counts = old_status.without_progress
        if counts.best_step > expected_counts.best_step:
            expected_counts = RestartCounts(best_step=counts.best_step)
        kind = "infrastructure" if ended.fault in (Fault.INFRASTRUCTURE, Fault.PREEMPTION) else "counted"
        has_preemptor = "scheduling" in spec or any(evidence.preemptor for evidence in ended.evidence)
        is_preempted = ended.reason == Reason.PREEMPTED and has_preemptor
        if ended.action != "Repair" and ended.reason != Reason.GANG_INCOMPLETE and not is_preempted:
            expected_counts = expected_counts.model_copy(update={kind: getattr(expected_counts, kind) + 1})
        policy = RestartPolicy.model_validate(spec.get("restartPolicy", {}))
        if counts != expected_counts:
            yield f"after {ended.reason} the counted restarts went from {old_status.without_progress} to {counts}"
        if counts.best_step > self._world.trainer.reached_steps[self._job.uid]:
            yield f"the budget was renewed for step {counts.best_step}, which no process completed"
        if counts.counted > policy.max_restarts or counts.infrastructure > policy.max_infrastructure_restarts:
            yield f"more restarts than the policy allows: {counts}"

    def _check_avoided_nodes(self, old_status: JobStatus, new_status: JobStatus) -> Iterator[str]:
        """Check that only Kubernetes nodes with a broken GPU or at least two failures of the job are avoided."""
        if not new_status.attempts or new_status.attempt == old_status.attempt:
            return
        # Use both statuses, because a status keeps only 20 records.
        records = {record.attempt: record for record in (*old_status.attempts, *new_status.attempts)}.values()
        failure_counts = Counter(record.k8s_node for record in records if record.state is AttemptState.FAILED)
        broken_nodes = {record.k8s_node for record in records if record.reason == Reason.GPU_HARDWARE}
        for node in new_status.attempts[-1].avoids:
            if failure_counts[node] < 2 and node not in broken_nodes:
                yield f"{node} is avoided, but failed the job {failure_counts[node]} times"

    def _check_repair(self, old_status: JobStatus, new_status: JobStatus) -> Iterator[str]:
        """Check that a repair keeps the effective batch and is never reverted."""
        old_batch, new_batch = old_status.batch, new_status.batch
        if old_status.repair == new_status.repair or old_batch is None or new_batch is None:
            return
        # A user may have resized the job while the attempt was stopping.
        was_resized = old_batch.world_size != new_batch.world_size
        if old_batch.effective != new_batch.effective and not was_resized:
            yield f"a repair changed the effective batch from {old_batch.effective} to {new_batch.effective}"
        changes = old_status.repair.model_dump(exclude_none=True) if old_status.repair else {}
        if new_status.repair is None or not changes.keys() <= new_status.repair.model_dump(exclude_none=True).keys():
            yield f"a repair was reverted: {old_status.repair} -> {new_status.repair}"

    def _check_conditions(self, status: JobStatus) -> Iterator[str]:
        true_conditions = {condition.type for condition in status.conditions if condition.status == "True"}
        if "Complete" in true_conditions and not self._world.trainer.folders[self._job.uid].has_result:
            yield "Complete without a result"
        if ("Complete" in true_conditions) + ("Failed" in true_conditions) != (status.completion_time is not None):
            yield f"completionTime and the terminal conditions disagree: {sorted(true_conditions)}"
        if "Suspended" not in true_conditions or self._has_split_brain or self._world.operator_clock_was_ahead:
            return
        for _, pod in self._job.list_pods():
            node = observe_pod(pod)
            if node and _is_considered_running(node) and node.may_run(self._world.now()):
                yield f"Suspended while {node.pod_name} may run"


def _is_considered_running(pod: NodeObservation) -> bool:
    """Return whether the operator must treat the pod as running.

    A terminating pod without labels does not count, because it stops without a further request and is fenced.
    """
    return not (pod.is_relabelled and pod.is_terminating)


def _has_changed_labels(change: Change) -> bool:
    """Return whether the labels were changed, so that label selectors miss the pod or match it by mistake."""
    if change.old_body is None or change.new_body is None:
        return False
    return bool(change.old_body["metadata"].get("labels") != change.new_body["metadata"].get("labels"))


def _get_container_state(pod: RawBody) -> RawBody:
    statuses: list[RawBody] = pod.get("status", {}).get("containerStatuses") or [{}]
    state: RawBody = statuses[0].get("state", {})
    return state
