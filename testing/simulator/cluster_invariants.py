"""Invariants of the whole cluster: outputs, foreign objects and the isolation of jobs from each other."""

from collections import Counter

from finetune_operator import names
from finetune_operator.observation.ownership import get_controller_uid
from testing.simulator.world.apiserver import Change, RawBody
from testing.simulator.world.world import World

MAX_WAIT_SECONDS = 120.0  # of a job in a work queue under network faults
# limits of the passes of one job: for its timers, for changes of its objects, and for retries
PASSES_PER_SECOND, PASSES_PER_CHANGE, EXTRA_PASSES = 0.25, 2, 30


class ClusterMonitor:
    """Checks the commits of operators and the output folders of all jobs."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._commit_counts: Counter[str] = Counter()  # by uid of the job whose objects changed
        world.server.listeners.append(self._on_commit)

    def check_output(self) -> None:
        """Check that no zombie publishes, at most one result exists, and every process uses the spec of its own job."""
        report = self._world.report
        for folder in self._world.trainer.folders.values():
            groups = [(publication.attempt, publication.group) for publication in folder.publications]
            if groups != sorted(groups):
                report(f"older pods published after newer ones (attempt, set of pods): {groups}")
            if [publication.content for publication in folder.publications].count("result") > 1:
                report("two results were published")
        for attempts in self._world.trainer.list_attempts_per_rendezvous():
            if len(attempts) > 1:
                report(f"processes of attempts {sorted(attempts)} joined one rendezvous")
        for process in self._world.trainer.processes:
            if process.spec_job_uids - {process.job_uid}:
                report(f"a process of job {process.job_uid} runs the spec of {sorted(process.spec_job_uids)}")
            if process.has_forged_spec:
                report(f"a process of job {process.job_uid} runs a program that another tenant wrote")

    def check_queues(self) -> None:
        """Check that no job delays the passes of another job for long, and that the number of passes is bounded."""
        for number, operator in enumerate(self._world.operators):
            if not operator.is_running or operator.process.is_paused:
                continue
            queue = operator.controller.queue
            if operator.can_act and queue.oldest_wait_seconds() > MAX_WAIT_SECONDS:
                self._world.report(f"a job waited {queue.oldest_wait_seconds():.0f} s for a pass of operator-{number}")
            for uid, count in operator.controller.pass_counts.items():
                changes = self._commit_counts[uid]
                limit = PASSES_PER_SECOND * self._world.time + PASSES_PER_CHANGE * changes + EXTRA_PASSES
                if count > limit * len(self._world.operators) ** self._world.has_split_brain:
                    self._world.report(f"operator-{number} ran {count} passes of {uid}, which changed {changes} times")

    def _on_commit(self, change: Change) -> None:
        owner_uid, uid = self._find_owner_uid(change.body), change.body["metadata"]["uid"]
        self._commit_counts[owner_uid or uid] += 1
        if not change.actor.startswith("operator"):
            return
        name = f"{change.kind} {change.body['metadata']['namespace']}/{change.body['metadata']['name']}"
        if change.old_body and self._is_foreign(change.old_body):
            self._world.report(f"{change.type} {name}, which belongs to a stranger")
        acting_uid = change.acting_job_uid
        regarded_uid = change.body.get("regarding", {}).get("uid")
        if acting_uid and acting_uid not in (owner_uid, uid, regarded_uid):
            self._world.report(f"the pass of {acting_uid} {change.type} {name}, which belongs to {owner_uid or uid}")

    def _is_foreign(self, body: RawBody) -> bool:
        uids = {self._find_owner_uid(body), body["metadata"]["uid"]}
        return not any(uids & set(job.uids) for job in self._world.jobs)

    def _find_owner_uid(self, body: RawBody) -> str | None:
        """Return the uid of the job that controls the object, or whose pods own the Workload."""
        if body["kind"] != names.WORKLOAD_KIND:
            return get_controller_uid(body)
        namespace, name = body["metadata"]["namespace"], body["metadata"]["name"]
        groups = {
            (job.key.namespace, names.workload_name(job.key.name, uid)): uid
            for job in self._world.jobs
            for uid in job.uids
        }
        return groups.get((namespace, name))
