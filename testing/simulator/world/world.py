"""Simulated cluster with jobs and their operators, into which faults can be injected."""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from finetune_operator import names
from finetune_operator.kube.api_client import ApiError
from testing.builders.jobs import SETTINGS, spec
from testing.simulator.world.apiserver import POD_GROUP_VERSION, Change, ObjectKey, RawBody, SimulatedApiServer
from testing.simulator.world.choices import Choices
from testing.simulator.world.gang_scheduler import GangScheduler
from testing.simulator.world.job import SimulatedJob
from testing.simulator.world.kubernetes_nodes import KubernetesNodes
from testing.simulator.world.kueue import SimulatedKueue
from testing.simulator.world.network import NO_FAULTS, Connection, NetworkFaults
from testing.simulator.world.node_controllers import GarbageCollector, NodeControllers
from testing.simulator.world.operator_process import ProcessEnvironment, SimulatedOperator
from testing.simulator.world.pod_network import PodNetwork
from testing.simulator.world.process_pause import create_pausable_task
from testing.simulator.world.releases import THIS_RELEASE, OperatorRelease
from testing.simulator.world.trainer import EPOCH, Trainer, TrainerProcess, Workload

JOB = ObjectKey(names.FINETUNEJOB_KIND, "default", "bert")
SPARE_K8S_NODES = 2
MAX_NODES = 3
GPUS_PER_NODE = 2
MAX_CLOCK_READS = 1000  # per job in ten seconds


@dataclass(frozen=True)
class WorldOptions:
    """Size of the cluster, and options of its operators."""

    k8s_nodes: int = MAX_NODES + SPARE_K8S_NODES
    workers: int = 2  # of each operator
    has_leader_election: bool = False
    replicas: int = 1  # operators that are started at first
    queue_quota: int = 0  # of Kueue, in pods
    has_pod_groups: bool = False  # whether the API server serves the PodGroups of Kubernetes 1.37
    can_pause: bool = False  # whether operators can be paused, which makes all their tasks slower


DEFAULT_OPTIONS = WorldOptions()


class World:
    """The simulated cluster; `trace` is a readable log of its events."""

    def __init__(
        self,
        choices: Choices,
        workload: Workload,
        *,
        network_faults: NetworkFaults = NO_FAULTS,
        options: WorldOptions = WorldOptions(),
        **fields: Any,
    ) -> None:
        self.choices = choices
        self.network_faults = network_faults
        self.options = options
        self.trace: list[str] = []
        self.violations: list[str] = []
        self.jobs: list[SimulatedJob] = []
        self._clock_reads, self._clock_reads_since = 0, 0.0
        self.server = SimulatedApiServer(self.now)
        self.server.listeners.append(self._trace_change)
        self.trainer = Trainer(workload, choices)
        self.k8s_nodes = KubernetesNodes(self.server, self.trainer, choices, count=options.k8s_nodes)
        self.node_controllers = NodeControllers(self.server, self.k8s_nodes, choices)
        self.garbage_collector = GarbageCollector(self.server, self.k8s_nodes, choices)
        self.kueue = SimulatedKueue(self.server, self.k8s_nodes, choices, quota=options.queue_quota)
        self.gang_scheduler = GangScheduler(self.server, self.k8s_nodes, choices)
        if options.has_pod_groups:
            self.server.served_versions.add(POD_GROUP_VERSION)
        self.operators: list[SimulatedOperator] = []
        self.release = THIS_RELEASE
        self.has_split_brain = False
        if options.can_pause:
            asyncio.get_running_loop().set_task_factory(create_pausable_task)
        self.faults_ended = False  # set once only permanent faults remain
        self.operator_clock_was_ahead = False  # an operator may have assumed too early that a grace period ended
        self.pending_recoveries: list[Callable[[], object]] = []
        self.poisoned_uids: set[str] = set()  # uids of jobs whose objects contain unexpected values
        self.slow_creates: dict[str, float] = {}  # seconds that admission webhooks take, by namespace
        self.create_job(JOB, numNodes=workload.num_nodes, **fields)

    def now(self) -> datetime:
        """Return the current time; fail if it is read too often, as in a busy loop of the operator."""
        if self.time > self._clock_reads_since + 10.0:
            self._clock_reads, self._clock_reads_since = 0, self.time
        self._clock_reads += 1
        if self._clock_reads > MAX_CLOCK_READS * max(1, len(self.jobs)):
            raise RuntimeError(f"{self._clock_reads} clock reads in ten seconds")
        return EPOCH + timedelta(seconds=self.time)

    @property
    def time(self) -> float:
        """Seconds since the start of the history."""
        return asyncio.get_running_loop().time()

    def create_job(self, key: ObjectKey, **fields: Any) -> SimulatedJob:
        """Create a job as a user, and the claims of its namespace."""
        for name in ("models", "datasets"):
            claim = ObjectKey("PersistentVolumeClaim", key.namespace, name)
            if self.server.get(claim) is None:
                metadata, access = {"namespace": claim.namespace, "name": name}, {"accessModes": ["ReadWriteMany"]}
                self.server.create({"kind": claim.kind, "metadata": metadata, "spec": access}, actor="user")
        job = SimulatedJob(self, key, spec(**{"resources": {"limits": {"nvidia.com/gpu": GPUS_PER_NODE}}, **fields}))
        self.jobs.append(job)
        return job

    def list_all_pods(self) -> list[tuple[ObjectKey, RawBody]]:
        """Return the pods of all jobs, including deleted jobs."""
        return [(key, pod) for key, pod in self.server.list_objects("Pod") if "labels" in pod["metadata"]]

    def list_running_processes(self) -> list[TrainerProcess]:
        """Return all running trainer processes, including those unknown to the API server."""
        return [process for process in self.trainer.processes if process.is_running]

    def start_operator(self) -> SimulatedOperator:
        """Start another operator process of the installed release."""
        name = f"operator-{len(self.operators)}"
        operator: SimulatedOperator

        def crash() -> None:
            self.crash(operator)

        def handle_exit(problem: str) -> None:
            if problem:
                self.report(f"{name} failed: {problem}")
            self.crash(operator)

        connection = Connection(self.server, self.choices, actor=name, on_crash=crash)
        connection.faults, connection.slow_creates = self.network_faults, self.slow_creates
        environment = ProcessEnvironment(
            connection=connection,
            pod_network=PodNetwork(self._read_pod_status),
            now=self.now,
            on_exit=handle_exit,
            trainer_image=self.release.trainer_image,
            version=self.release.version,
            supervisor=SETTINGS.supervisor,
            workers=self.options.workers,
            has_leader_election=self.options.has_leader_election,
        )
        operator = self.release.start(environment)
        self.operators.append(operator)
        self.add_trace(f"{name} of release {self.release.version} starts")
        return operator

    def roll_out(self, release: OperatorRelease, *, delay_seconds: float) -> None:
        """Install another release: start an operator of it, and stop the earlier ones gracefully after a delay."""
        self.release = release
        earlier_operators = [operator for operator in self.operators if operator.is_running]
        self.start_operator()
        for operator in earlier_operators:
            asyncio.get_running_loop().call_later(delay_seconds, operator.stop)

    def pause(self, operator: SimulatedOperator, seconds: float) -> None:
        """Pause the process of an operator, as a live migration or CPU throttling does."""
        self.add_trace(f"operator-{self.operators.index(operator)} pauses for {seconds} s")
        operator.process.pause()
        asyncio.get_running_loop().call_later(seconds, operator.process.resume)

    def crash(self, operator: SimulatedOperator) -> None:
        """Crash an operator and start another one later; without split brain, drop its requests in flight."""
        if not operator.is_running:
            return
        self.add_trace(f"operator-{self.operators.index(operator)} dies")
        operator.crash()
        if not self.has_split_brain:
            operator.connection.drop_requests()
        asyncio.get_running_loop().call_later(self.choices.pick((1.0, 15.0, 90.0)), self.start_operator)

    def take_over(self, overlap_seconds: float) -> None:
        """Start another leader; the former leaders continue to act for `overlap_seconds`."""
        earlier_leaders = [operator for operator in self.operators if operator.is_running]
        self.start_operator()
        for operator in earlier_leaders:
            asyncio.get_running_loop().call_later(overlap_seconds, operator.crash)

    def end_faults(self) -> None:
        """Stop injecting faults and repair all temporary ones."""
        self.add_trace("faults end")
        self.faults_ended = True
        self.network_faults = NO_FAULTS
        self.slow_creates.clear()
        while self.pending_recoveries:
            self.pending_recoveries.pop()()
        for operator in self.operators:
            operator.connection.faults = NO_FAULTS
            operator.connection.is_partitioned = False

    def delete(self, key: ObjectKey, options: RawBody) -> None:
        """Delete an object as a user if it exists."""
        try:
            self.server.delete(key, options, actor="user")
        except ApiError as error:
            if error.status != 404:
                raise

    def report(self, message: str) -> None:
        """Record a violated invariant with a timestamp."""
        self.violations.append(f"{self.time:8.3f} {message}")

    def has_foreign_objects(self) -> bool:
        """Return whether foreign objects may occupy a name that a job needs."""
        kinds = ("Pod", "ConfigMap")
        return any("labels" not in body["metadata"] for kind in kinds for _, body in self.server.list_objects(kind))

    def get_decoy_ip(self, job: SimulatedJob) -> str:
        """Return the IP address of the pods of strangers that imitate the pods of this job."""
        return f"10.9.0.{1 + self.jobs.index(job)}"

    def _read_pod_status(self, address: str) -> bytes | None:
        for job in self.jobs:
            if address == self.get_decoy_ip(job):
                return self.trainer.render_forged_status(job.uid)
        process = self.k8s_nodes.find_process_at(address)
        return None if process is None else self.trainer.render_status(process)

    def add_trace(self, line: str) -> None:
        """Append a line with a timestamp to the trace."""
        self.trace.append(f"{self.time:8.3f} {line}")

    def _trace_change(self, change: Change) -> None:
        body = change.body
        metadata = body["metadata"]
        namespace = "" if metadata["namespace"] == JOB.namespace else f"{metadata['namespace']}/"
        line = f"{change.actor}: {change.type} {change.kind} {namespace}{metadata['name']}"
        if change.kind == "Pod":
            statuses: list[RawBody] = body.get("status", {}).get("containerStatuses") or [{}]
            state = statuses[0].get("state", {})
            line += f" {body.get('status', {}).get('phase')} {'/'.join(state)} on {body['spec'].get('nodeName')}"
            line += " terminating" if "deletionTimestamp" in body["metadata"] else ""
            line += " gated" if body["spec"].get("schedulingGates") else ""
            line += " held" if body["metadata"].get("finalizers") else ""
        if change.kind == names.WORKLOAD_KIND:
            line += f" {' '.join(c['type'] for c in body['status'].get('conditions', ()) if c['status'] == 'True')}"
        if change.kind == names.FINETUNEJOB_KIND:
            status = body.get("status", {})
            record = (status.get("attempts") or [{}])[-1]
            line += (
                f" suspend={body['spec'].get('suspend', False)} {status.get('phase')} attempt {status.get('attempt')}"
            )
            line += f" {record.get('state')} created={record.get('created', False)} {record.get('reason', '')}"
        if change.kind == "Event":
            line += f" {body['reason']}: {body['note']}"
        self.add_trace(line)

    def is_lost(self, pod: RawBody) -> bool:
        """Return whether the Kubernetes node of the pod is disconnected from the API server."""
        k8s_node = self.k8s_nodes.find_k8s_node(pod)
        return k8s_node is not None and not k8s_node.connected.is_set()


class ErrorLog(logging.Handler):
    """Log handler that reports every error that the operator logs."""

    def __init__(self, report: Callable[[str], None]) -> None:
        super().__init__(logging.ERROR)
        self._report = report

    def emit(self, record: logging.LogRecord) -> None:
        """Report one logged error."""
        self._report(logging.Formatter().format(record))
