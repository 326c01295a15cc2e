"""What must never be seen at the API server, nor in the output, whatever happens."""

from collections.abc import Iterator

from finetune_api.status import AttemptRecord, AttemptState, JobStatus
from finetune_api.v1alpha1 import FineTuneJob, RestartPolicy
from finetune_operator import names
from finetune_operator.observe import observe_pod
from support.simulator.apiserver import Change, Raw
from support.simulator.world import World

NEXT_STATES = {
    AttemptState.STARTING: {"Starting", "Running", "Stopping", "Failed", "Succeeded"},
    AttemptState.RUNNING: {"Running", "Stopping", "Failed", "Succeeded"},
    AttemptState.STOPPING: {"Stopping", "Failed", "Stopped", "Succeeded"},
    AttemptState.STOPPED: {"Stopped"},
    AttemptState.SUCCEEDED: {"Succeeded"},
    AttemptState.FAILED: {"Failed"},
}


class Monitor:
    """Hears of every commit and collects what is wrong with it."""

    def __init__(self, world: World, *, several_operators: bool) -> None:
        self.violations: list[str] = []
        self._world = world
        self._several = several_operators
        self._forced: set[str] = set()  # pods whose objects are gone although they ran
        world.server.listeners.append(self._hear)

    def report(self, what: str) -> None:
        """Something is wrong."""
        self.violations.append(f"{self._world.time:8.3f} {what}")

    def check_output(self) -> None:
        """Who published what: an older attempt never after a newer one took the lock, and one result."""
        folder = self._world.trainer.folder
        groups = [(publication.attempt, publication.group) for publication in folder.publications]
        if groups != sorted(groups):
            self.report(f"older pods published after newer ones (attempt, set of pods): {groups}")
        if [publication.what for publication in folder.publications].count("result") > 1:
            self.report("two results were published")

    def _hear(self, change: Change) -> None:
        by_operator = change.actor.startswith("operator")
        if change.kind == "Pod":
            if change.after is None and change.actor in ("user", "garbage collector"):
                self._forced.add(change.body["metadata"]["uid"])
            if by_operator:
                found = self._pod_made(change) if change.before is None else self._pod_deleted(change)
                for what in found:
                    self.report(what)
        if change.kind == names.FINETUNEJOB_KIND and by_operator and change.before and change.after:
            for what in self._status_written(change.before, change.after):
                self.report(what)

    def _status(self) -> JobStatus:
        return JobStatus.model_validate(self._world.status)

    def _pod_made(self, change: Change) -> Iterator[str]:
        made = observe_pod(change.body, gone=False)
        assert made is not None
        if self._several or self._world.job is None:
            return
        status = self._status()
        if status.attempt != made.attempt or status.completion_time is not None:
            yield f"{made.pod_name} was made while the status says attempt {status.attempt}"
        elif status.attempts[-1].state is not AttemptState.STARTING or status.attempts[-1].created:
            yield f"{made.pod_name} was made although its attempt is {status.attempts[-1].state} and created"
        for _, pod in self._world.pods():
            other = observe_pod(pod, gone=False)
            if other and other.attempt != made.attempt and other.may_run(self._world.now()):
                yield f"{made.pod_name} was made while {other.pod_name} may run"
        for process in self._world.running_processes():
            _, machine = self._world.machines.processes[process.pod_uid]
            excused = machine.losses or process.pod_uid in self._forced
            if process.attempt != made.attempt and not excused:
                yield f"{made.pod_name} was made while a process of attempt {process.attempt} runs on {machine.name}"

    def _pod_deleted(self, change: Change) -> Iterator[str]:
        pod = observe_pod(change.body, gone=False)
        assert pod is not None
        status = self._status()
        if self._several or status.attempt is None or not self._world.job:
            return
        ended = status.completion_time is not None or status.attempts[-1].state in ("Stopping", "Stopped")
        if not ended and pod.attempt == status.attempt:
            yield f"{pod.pod_name} was deleted while the status says {status.attempts[-1].state}"

    def _status_written(self, body: Raw, written: Raw) -> Iterator[str]:
        before = JobStatus.model_validate(body.get("status") or {})
        after = JobStatus.model_validate(written["status"])
        if before.completion_time is not None:
            if before != after:
                yield "the status changed after the end"
            return
        yield from self._attempts(before, after)
        yield from self._budgets(before, after, FineTuneJob.parse(written).spec.restart_policy)
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
        if later.reason == "PeerLost" != record.reason and self._could_know_better(later):
            yield f"the verdict on attempt {record.attempt} is that of a victim: {later.message}"
        if not present and later != record:
            yield f"the record of attempt {record.attempt} changed after its end"

    def _could_know_better(self, ended: AttemptRecord) -> bool:
        """The node that ended the training has told, or can still tell."""
        cause = self._world.trainer.causes.get(ended.attempt)
        if any(evidence.node_rank == cause and evidence.exit_code is not None for evidence in ended.evidence):
            return True
        labels = {names.ATTEMPT: str(ended.attempt), names.NODE_RANK: str(cause)}
        pods = (pod for _, pod in self._world.pods() if labels.items() <= pod["metadata"]["labels"].items())
        return any(not self._world.is_lost(pod) for pod in pods)

    def _budgets(self, before: JobStatus, after: JobStatus, policy: RestartPolicy) -> Iterator[str]:
        if after.restarts == before.restarts:
            return
        spent = sum((after.without_progress.counted, after.without_progress.infrastructure))
        spent_before = sum((before.without_progress.counted, before.without_progress.infrastructure))
        progressed = after.without_progress.best_step > before.without_progress.best_step
        if spent != (1 if progressed else spent_before + 1):
            yield f"a restart took the spent restarts from {before.without_progress} to {after.without_progress}"
        counts = after.without_progress
        if counts.counted > policy.max_restarts or counts.infrastructure > policy.max_infrastructure_restarts:
            yield f"restarts beyond the limits: {counts}"

    def _claims(self, after: JobStatus) -> Iterator[str]:
        holds = {condition.type for condition in after.conditions if condition.status == "True"}
        if "Complete" in holds and not self._world.trainer.folder.result:
            yield "Complete without a result"
        if ("Complete" in holds) + ("Failed" in holds) != (after.completion_time is not None):
            yield f"an end without its condition, or the other way round: {sorted(holds)}"
        if "Suspended" not in holds or self._several:
            return
        for _, pod in self._world.pods():
            node = observe_pod(pod, gone=False)
            if node and node.may_run(self._world.now()):
                yield f"Suspended while {node.pod_name} may run"
