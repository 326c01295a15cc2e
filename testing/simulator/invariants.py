"""What must never be seen at the API server, nor in the output, whatever happens."""

from collections import Counter
from collections.abc import Iterator

from finetune_api.v1alpha1.job import RestartPolicy
from finetune_api.v1alpha1.reasons import Reason
from finetune_api.v1alpha1.status import AttemptRecord, AttemptState, Fault, JobStatus, RestartCounts
from finetune_operator import names
from finetune_operator.observation.pods import NodeObservation, controller, observe_pod
from finetune_operator.plan.manifests import names_pods
from testing.simulator.world.apiserver import Change, Key, Raw
from testing.simulator.world.node_controllers import FORCING
from testing.simulator.world.world import JOB, World

NEXT_STATES = {
    AttemptState.STARTING: {"Starting", "Running", "Stopping", "Failed", "Succeeded"},
    AttemptState.RUNNING: {"Running", "Stopping", "Failed", "Succeeded"},
    AttemptState.STOPPING: {"Stopping", "Failed", "Stopped", "Succeeded"},
    AttemptState.STOPPED: {"Stopped"},
    AttemptState.SUCCEEDED: {"Succeeded"},
    AttemptState.FAILED: {"Failed"},
}


DEFAULT_STARTUP_SECONDS = 600
PATIENT_REASONS = (Reason.IMAGE_PULL_FAILED, Reason.CONTAINER_CREATING)
LIVING = (AttemptState.STARTING, AttemptState.RUNNING)
SERVICE = Key("Service", JOB.namespace, names.service_name(JOB.name))
ATTENDING_SECONDS = 120.0  # that an operator which is there may need, in any weather


class Monitor:
    """Hears of every commit and collects what is wrong with it."""

    def __init__(self, world: World, *, several_operators: bool) -> None:
        self.violations: list[str] = []
        self._world = world
        self._several = several_operators
        self._forced: set[str] = set()  # pods whose objects are gone, or cannot be found, although they ran
        self._given_up: set[str] = set()  # pods that could run no more, whatever was written on them later
        self._newest: dict[str, str] = {}  # uid of the last pod of each name
        self._last: tuple[Raw, JobStatus] = ({}, JobStatus())  # the job as it was last written
        # job and attempt, and for how many seconds nodes that run have waited for others that cannot
        self._idle: tuple[tuple[str, int | None], float] = (("", None), 0.0)
        self._nameless = 0.0  # seconds that pods which live have had no Service
        world.server.listeners.append(self._hear)

    def report(self, what: str) -> None:
        """Something is wrong."""
        self.violations.append(f"{self._world.time:8.3f} {what}")

    def check_idle(self, seconds: float) -> None:
        """Once in so many seconds: nodes that run do not hold their machines for others that cannot."""
        status, job = self._status(), self._world.job
        if job is None or status.waiting is None or status.waiting.reason in PATIENT_REASONS:
            self._idle = ("", None), 0.0
            return
        present = [
            p for _, p in self._world.pods() if p["metadata"]["labels"].get(names.ATTEMPT) == str(status.attempt)
        ]
        held = any("running" in _state(pod) and not self._world.is_lost(pod) for pod in present)
        attempt = self._world.job_uid, status.attempt
        idle = self._idle[1] if self._idle[0] == attempt and held else 0.0
        self._idle = attempt, idle + seconds * self._attended()
        limit = job["spec"].get("startupDeadlineSeconds", DEFAULT_STARTUP_SECONDS)
        if limit and idle > limit + ATTENDING_SECONDS:
            self.report(f"nodes of attempt {status.attempt} waited {idle} s for others that do not start")

    def check_service(self, seconds: float) -> None:
        """Once in so many seconds: an attempt's pods do not stay without names."""
        status, job, service = self._status(), self._world.job, self._world.server.get(SERVICE)
        stays = job is not None and "deletionTimestamp" not in job["metadata"]
        lives = stays and status.attempts and status.attempts[-1].created and status.attempts[-1].state in LIVING
        named = service is not None and names_pods(service, self._world.job_uid)
        self._nameless = self._nameless + seconds * self._attended() if lives and not named else 0.0
        if self._nameless > ATTENDING_SECONDS:
            self.report(f"attempt {status.attempt} had no Service, or one that was edited, for {self._nameless} s")

    def _attended(self) -> bool:
        """An operator is there that sees, can act and knows what time it is."""
        operators = (operator for operator in self._world.operators if operator.alive and not operator.link.cut)
        return any(abs(operator.clock_error.total_seconds()) < ATTENDING_SECONDS for operator in operators)

    def check_output(self) -> None:
        """Who published what: an older attempt never after a newer one took the lock, and one result."""
        for folder in self._world.trainer.folders.values():
            groups = [(publication.attempt, publication.group) for publication in folder.publications]
            if groups != sorted(groups):
                self.report(f"older pods published after newer ones (attempt, set of pods): {groups}")
            if [publication.what for publication in folder.publications].count("result") > 1:
                self.report("two results were published")
        for attempts in self._world.trainer.meetings():
            if len(attempts) > 1:
                self.report(f"processes of attempts {sorted(attempts)} met at one rendezvous")

    def _hear(self, change: Change) -> None:
        by_operator = change.actor.startswith("operator")
        if change.kind == "Pod":
            self._note_pod(change)
            if change.actor == "scheduler":
                self._placed(change)
            if by_operator and controller(change.body) == self._world.job_uid:
                found = self._pod_made(change) if change.before is None else self._pod_deleted(change)
                for what in found:
                    self.report(what)
        if by_operator and change.before and self._is_foreign(change.before):
            self.report(f"{change.type} {change.kind} {change.body['metadata']['name']}, which is somebody else's")
        if change.kind == names.FINETUNEJOB_KIND and by_operator and change.before and change.after:
            for what in self._status_written(change.before, change.after):
                self.report(what)

    def _note_pod(self, change: Change) -> None:
        metadata = change.body["metadata"]
        if (change.after is None and change.actor in ("user", *FORCING)) or _hidden(change):
            self._forced.add(metadata["uid"])
        if change.before is None:
            self._newest[metadata["name"]] = metadata["uid"]
        elif (pod := observe_pod(change.before, gone=False)) and not pod.may_run(self._world.now()):
            self._given_up.add(pod.uid)

    def _is_foreign(self, body: Raw) -> bool:
        return not {controller(body), body["metadata"]["uid"]} & set(self._world.job_uids)

    def _placed(self, change: Change) -> None:
        """No attempt comes to a machine that it avoids, nor back to one that is broken."""
        pod, job = observe_pod(change.body, gone=False), self._world.job
        if pod is None or job is None or controller(change.body) != self._world.job_uid:
            return
        for record in self._status().attempts:
            if record.attempt == pod.attempt and pod.k8s_node in record.avoids:
                self.report(f"{pod.pod_name} was placed on {pod.k8s_node}, which its attempt avoids")
            known = record.attempt < pod.attempt and record.reason == Reason.GPU_HARDWARE
            avoiding = job["spec"].get("restartPolicy", {}).get("avoidFailingNodes", True)
            if avoiding and known and record.k8s_node == pod.k8s_node:
                self.report(f"{pod.pod_name} was placed on {pod.k8s_node}, whose GPU failed attempt {record.attempt}")

    def _status(self) -> JobStatus:
        if self._world.job is not self._last[0]:
            self._last = self._world.job or {}, JobStatus.model_validate(self._world.status)
        return self._last[1]

    def _pod_made(self, change: Change) -> Iterator[str]:
        made = observe_pod(change.body, gone=False)
        assert made is not None
        status = self._status()
        if self._world.job is not None and made.attempt > (-1 if status.attempt is None else status.attempt):
            yield f"{made.pod_name} was made before its attempt was written"
        if self._several or self._world.job is None:
            return
        if status.attempt != made.attempt or status.completion_time is not None:
            yield f"{made.pod_name} was made while the status says attempt {status.attempt}"
        elif status.attempts[-1].state is not AttemptState.STARTING or status.attempts[-1].created:
            yield f"{made.pod_name} was made although its attempt is {status.attempts[-1].state} and created"
        if not self._world.clocks_ahead:
            yield from self._others_run(made)

    def _others_run(self, made: NodeObservation) -> Iterator[str]:
        """Nothing of another attempt, as far as anybody can know."""
        for _, pod in self._world.pods():
            other = observe_pod(pod, gone=False)
            if other is None or other.attempt == made.attempt or other.uid in self._given_up:
                continue
            if _may_be_known_to_run(other) and other.may_run(self._world.now()):
                yield f"{made.pod_name} was made while {other.pod_name} may run"
        for process in self._world.running_processes():
            _, machine = self._world.machines.processes[process.pod_uid]
            excused = machine.losses or process.pod_uid in self._forced
            ours = process.job_uid == self._world.job_uid
            if ours and process.attempt != made.attempt and not excused:
                yield f"{made.pod_name} was made while a process of attempt {process.attempt} runs on {machine.name}"

    def _pod_deleted(self, change: Change) -> Iterator[str]:
        pod, status = observe_pod(change.body, gone=False), self._status()
        if pod is None or pod.hidden or self._several or status.attempt is None or not self._world.job:
            return
        ended = status.completion_time is not None or status.attempts[-1].state in ("Stopping", "Stopped")
        if not ended and pod.attempt == status.attempt:
            yield f"{pod.pod_name} was deleted while the status says {status.attempts[-1].state}"

    def _status_written(self, body: Raw, written: Raw) -> Iterator[str]:
        before = self._last[1] if body is self._last[0] else JobStatus.model_validate(body.get("status") or {})
        after = JobStatus.model_validate(written["status"])
        self._last = written, after
        if before.completion_time is not None:
            if before != after:
                yield "the status changed after the end"
            return
        yield from self._attempts(before, after)
        yield from self._budgets(before, after, written["spec"].get("restartPolicy", {}))
        yield from self._avoided(before, after)
        yield from self._repaired(before, after)
        yield from self._claims(after)

    def _attempts(self, before: JobStatus, after: JobStatus) -> Iterator[str]:
        first = before.attempt if before.attempt is not None else -1
        if after.attempt is None or after.attempt - first not in (0, 1):
            if after.attempt is not None or before.attempt is not None:
                yield f"the attempt went from {before.attempt} to {after.attempt}"
            return
        now = {record.attempt: record for record in after.attempts}
        for record in before.attempts:
            if later := now.get(record.attempt):
                yield from self._record(record, later, present=record.attempt >= first)
        if after.attempt > first >= 0:
            old = now[first]
            if old.state not in (AttemptState.FAILED, AttemptState.STOPPED):
                yield f"attempt {after.attempt} was begun while attempt {first} is {old.state}"
            if after.restarts - before.restarts != (old.state is AttemptState.FAILED):
                yield f"restarts went from {before.restarts} to {after.restarts} after attempt {first} {old.state}"

    def _record(self, record: AttemptRecord, later: AttemptRecord, *, present: bool) -> Iterator[str]:
        if later.state not in NEXT_STATES[record.state]:
            yield f"attempt {record.attempt} went from {record.state} to {later.state}"
        victims = {evidence.node_rank for evidence in later.evidence if evidence.victim}
        of_victim = later.reason == Reason.PEER_LOST or (later.reason == Reason.HANG and later.node_rank in victims)
        if of_victim and later.reason != record.reason and self._could_know_better(later):
            yield f"the verdict on attempt {record.attempt} is that of a victim: {later.message}"
        unseen = {evidence.node_rank for evidence in later.evidence if not evidence.pod_name and not evidence.deleted}
        if later.reason == Reason.UNEXPLAINED and later.node_rank in unseen:
            yield f"the verdict on attempt {record.attempt} is that of node {later.node_rank}, which was never made"
        if not present and later != record:
            yield f"the record of attempt {record.attempt} changed after its end"

    def _could_know_better(self, ended: AttemptRecord) -> bool:
        """The node that ended the training has told, or can still tell."""
        cause = self._world.trainer.causes.get((self._world.job_uid, ended.attempt))
        if cause is None or self._world.clocks_ahead:
            return False
        evidence = next((each for each in ended.evidence if each.node_rank == cause.node_rank), None)
        if evidence and self._newest.get(evidence.pod_name, cause.pod_uid) != cause.pod_uid:
            return False  # its pod is gone, and one that was made again in its place has told
        if evidence and evidence.exit_code is not None:
            return not evidence.victim  # where a link failed, all nodes are victims
        pod = next((pod for _, pod in self._world.pods() if pod["metadata"]["uid"] == cause.pod_uid), None)
        return pod is not None and not self._world.is_lost(pod)

    def _budgets(self, before: JobStatus, after: JobStatus, limits: Raw) -> Iterator[str]:
        """Repairs and a lack of room cost nothing, lost machines nothing that failures of the job itself may use."""
        if after.restarts == before.restarts:
            return
        ended, counts = after.attempts[-2], after.without_progress
        started = before.without_progress
        if counts.best_step > started.best_step:
            started = RestartCounts(best_step=counts.best_step)
        kind = "infrastructure" if ended.fault in (Fault.INFRASTRUCTURE, Fault.PREEMPTION) else "counted"
        if ended.action != "Repair" and ended.reason != Reason.GANG_INCOMPLETE:
            started = started.model_copy(update={kind: getattr(started, kind) + 1})
        policy = RestartPolicy.model_validate(limits)
        if counts != started:
            yield f"after {ended.reason} the spent restarts went from {before.without_progress} to {counts}"
        if counts.counted > policy.max_restarts or counts.infrastructure > policy.max_infrastructure_restarts:
            yield f"restarts beyond the limits: {counts}"

    def _avoided(self, before: JobStatus, after: JobStatus) -> Iterator[str]:
        """Only what failed the job, and once only where its hardware is broken."""
        if not after.attempts or after.attempt == before.attempt:
            return
        records = {record.attempt: record for record in (*before.attempts, *after.attempts)}.values()  # 20 are kept
        blamed = Counter(record.k8s_node for record in records if record.state is AttemptState.FAILED)
        broken = {record.k8s_node for record in records if record.reason == Reason.GPU_HARDWARE}
        for node in after.attempts[-1].avoids:
            if blamed[node] < 2 and node not in broken:
                yield f"{node} is avoided, but failed the job {blamed[node]} times"

    def _repaired(self, before: JobStatus, after: JobStatus) -> Iterator[str]:
        """What is learnt stays the same, and no change is taken back."""
        if before.repair == after.repair or before.batch is None or after.batch is None:
            return
        resized = before.batch.world_size != after.batch.world_size  # by the user, while the attempt was stopping
        if before.batch.effective != after.batch.effective and not resized:
            yield f"a repair changed the effective batch from {before.batch.effective} to {after.batch.effective}"
        made = before.repair.model_dump(exclude_none=True) if before.repair else {}
        if after.repair is None or not made.keys() <= after.repair.model_dump(exclude_none=True).keys():
            yield f"a repair was taken back: {before.repair} -> {after.repair}"

    def _claims(self, after: JobStatus) -> Iterator[str]:
        holds = {condition.type for condition in after.conditions if condition.status == "True"}
        if "Complete" in holds and not self._world.trainer.folders[self._world.job_uid].result:
            yield "Complete without a result"
        if ("Complete" in holds) + ("Failed" in holds) != (after.completion_time is not None):
            yield f"an end without its condition, or the other way round: {sorted(holds)}"
        if "Suspended" not in holds or self._several or self._world.clocks_ahead:
            return
        for _, pod in self._world.pods():
            node = observe_pod(pod, gone=False)
            if node and _may_be_known_to_run(node) and node.may_run(self._world.now()):
                yield f"Suspended while {node.pod_name} may run"


def _may_be_known_to_run(pod: NodeObservation) -> bool:
    """One that is leaving goes by itself, so nobody asks why it is not seen any more; fences hold its processes off."""
    return not (pod.hidden and pod.deleting)


def _hidden(change: Change) -> bool:
    """Somebody edited the labels, so that the operator does not find the pod any more, or not as what it was."""
    if change.before is None or change.after is None:
        return False
    return bool(change.before["metadata"].get("labels") != change.after["metadata"].get("labels"))


def _state(pod: Raw) -> Raw:
    statuses: list[Raw] = pod.get("status", {}).get("containerStatuses") or [{}]
    state: Raw = statuses[0].get("state", {})
    return state
