"""Invariants of the whole cluster: outputs, foreign objects and the isolation of jobs from each other."""

from finetune_operator.observation.ownership import get_controller_uid
from testing.simulator.world.apiserver import Change, RawBody
from testing.simulator.world.world import World


class ClusterMonitor:
    """Checks the commits of operators and the output folders of all jobs."""

    def __init__(self, world: World) -> None:
        self._world = world
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

    def _on_commit(self, change: Change) -> None:
        if change.actor.startswith("operator") and change.old_body and self._is_foreign(change.old_body):
            name = change.body["metadata"]["name"]
            self._world.report(f"{change.type} {change.kind} {name}, which belongs to a stranger")

    def _is_foreign(self, body: RawBody) -> bool:
        uids = {get_controller_uid(body), body["metadata"]["uid"]}
        return not any(uids & set(job.uids) for job in self._world.jobs)
