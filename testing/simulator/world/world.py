"""One simulated cluster with one job and its operators, and the things that can happen to it."""

import asyncio
import logging
from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any

from finetune_api.v1alpha1.status import JobStatus
from finetune_operator import names
from finetune_operator.kube.api_client import ApiError
from finetune_operator.observation.pods import controller
from testing.builders.jobs import SETTINGS, spec
from testing.simulator.world.apiserver import Change, Key, Raw, SimulatedApiServer
from testing.simulator.world.choices import Choices
from testing.simulator.world.kubernetes_nodes import Machine, Machines
from testing.simulator.world.network import CALM, Link, Weather
from testing.simulator.world.node_controllers import GarbageCollector, NodeControllers
from testing.simulator.world.operator_process import OperatorProcess
from testing.simulator.world.trainer import EPOCH, Process, Trainer, Workload

JOB = Key(names.FINETUNEJOB_KIND, "default", "bert")
SPARE_MACHINES = 2
MOST_NODES = 3
MOST_LOOKS = 1000


class World:
    """Everything there is; `trace` is what happened, for people."""

    def __init__(self, choices: Choices, workload: Workload, *, weather: Weather = CALM, **fields: Any) -> None:
        self.choices = choices
        self.weather = weather
        self.trace: list[str] = []
        self._looks, self._looked_at = 0, 0.0
        self.server = SimulatedApiServer(self.now)
        self.server.listeners.append(self._note_change)
        self.trainer = Trainer(workload, choices)
        self.machines = Machines(self.server, self.trainer, choices, count=MOST_NODES + SPARE_MACHINES)
        self.nodes = NodeControllers(self.server, self.machines, choices)
        self.garbage = GarbageCollector(self.server, self.machines, choices)
        self.operators: list[OperatorProcess] = []
        self.several_operators = False
        self.calm = False
        self.clocks_ahead = False  # an operator may have taken what was left of a grace period for over
        self.to_mend: list[Callable[[], None]] = []
        claim = {"kind": "PersistentVolumeClaim", "metadata": {"namespace": "default"}}
        for name in ("models", "datasets"):
            metadata = {"namespace": "default", "name": name}
            self.server.create(
                {**claim, "metadata": metadata, "spec": {"accessModes": ["ReadWriteMany"]}}, actor="user"
            )
        self.job_uids: list[str] = []  # of the jobs of this name, one after another
        self.apply(spec(numNodes=workload.num_nodes, **fields))

    def now(self) -> datetime:
        """The clock on every wall; an operator looks at it once or twice in a pass."""
        if self.time > self._looked_at + 10.0:
            self._looks, self._looked_at = 0, self.time
        self._looks += 1
        if self._looks > MOST_LOOKS:
            raise RuntimeError(f"{MOST_LOOKS} passes in ten seconds")
        return EPOCH + timedelta(seconds=self.time)

    @property
    def time(self) -> float:
        """Seconds since the beginning."""
        return asyncio.get_running_loop().time()

    @property
    def job_uid(self) -> str:
        """Of the present job, or the last."""
        return self.job_uids[-1]

    @property
    def job(self) -> Raw | None:
        """The job as the API server has it."""
        return self.server.get(JOB)

    @property
    def status(self) -> Raw:
        """The job's status; empty if there is none."""
        status: Raw = (self.job or {}).get("status", {})
        return status

    def pods(self) -> list[tuple[Key, Raw]]:
        """The job's pods that exist, those on their way out too."""
        return [(key, pod) for key, pod in self.all_pods() if controller(pod) == self.job_uid]

    def all_pods(self) -> list[tuple[Key, Raw]]:
        """Also those of jobs that had its name before."""
        return [(key, pod) for key, pod in self.server.all("Pod") if "labels" in pod["metadata"]]

    def running_processes(self) -> list[Process]:
        """Trainers that run, whoever knows."""
        return [process for process in self.trainer.processes if process.alive]

    def start_operator(self) -> OperatorProcess:
        """One more."""
        name = f"operator-{len(self.operators)}"
        operator: OperatorProcess

        def die() -> None:
            self.crash(operator)

        link = Link(self.server, self.choices, actor=name, on_crash=die)
        link.weather = self.weather
        operator = OperatorProcess(link, SETTINGS, self.now, self.trainer.progress)
        self.operators.append(operator)
        self.note(f"{name} starts")
        return operator

    def crash(self, operator: OperatorProcess) -> None:
        """It dies, and another starts a little later. With one operator, nothing that it sent is still under way."""
        if not operator.alive:
            return
        self.note(f"operator-{self.operators.index(operator)} dies")
        operator.crash()
        if not self.several_operators:
            operator.link.drop_requests()
        asyncio.get_running_loop().call_later(self.choices.pick((1.0, 15.0, 90.0)), self.start_operator)

    def take_over(self, overlap: float) -> None:
        """Another operator leads; those that led go on until they notice, and what they sent goes on after them."""
        former = [operator for operator in self.operators if operator.alive]
        self.start_operator()
        for operator in former:
            asyncio.get_running_loop().call_later(overlap, operator.crash)

    def calm_down(self) -> None:
        """Faults stop, and what was only broken for a while is mended."""
        self.note("faults stop")
        self.calm = True
        self.weather = CALM
        while self.to_mend:
            self.to_mend.pop()()
        for operator in self.operators:
            operator.link.weather = CALM
            operator.link.cut = False

    def apply(self, spec: Raw) -> None:
        """kubectl apply, where there is no such job."""
        manifest = {
            "apiVersion": names.API_VERSION,
            "kind": names.FINETUNEJOB_KIND,
            "metadata": {"name": JOB.name, "namespace": JOB.namespace},
            "spec": spec,
        }
        self.job_uids.append(self.server.create(manifest, actor="user")["metadata"]["uid"])

    def edit_spec(self, **fields: Any) -> None:
        """A user changes the spec."""
        if self.job is not None:
            metadata = self.job["metadata"]
            metadata = {**metadata, "generation": metadata["generation"] + 1}
            self.server.change(JOB, actor="user", metadata=metadata, spec={**self.job["spec"], **fields})

    def touch(self) -> None:
        """A user changes an annotation, so that the version that others hold is old."""
        if self.job is not None:
            annotations = {"touched": str(self.time)}
            self.server.change(JOB, actor="user", metadata={**self.job["metadata"], "annotations": annotations})

    def delete(self, key: Key, options: Raw) -> None:
        """A user deletes something, if it is there."""
        try:
            self.server.delete(key, options, actor="user")
        except ApiError as error:
            if error.status != 404:
                raise

    def pick_pod(self) -> tuple[Key, Raw] | None:
        """Some pod."""
        pods = self.pods()
        return self.choices.pick(pods) if pods else None

    def pick_process(self) -> Process | None:
        """Some trainer that runs."""
        running = self.running_processes()
        return self.choices.pick(running) if running else None

    def pick_machine(self) -> Machine:
        """A machine with a pod, if there is one."""
        used = [machine for _, pod in self.pods() if (machine := self.machines.machine_of(pod))]
        return self.choices.pick(used or self.machines.machines)

    def lacks_machines(self) -> bool:
        """Those that are well and not avoided are fewer than the job needs."""
        avoided = JobStatus.model_validate(self.status).attempts[-1].avoids if self.status.get("attempts") else ()
        well = [m for m in self.machines.machines if m.up.is_set() and m.has_room and m.name not in avoided]
        wanted: int = self.job["spec"]["numNodes"] if self.job else 0
        return len(well) < wanted

    def has_strangers(self) -> bool:
        """Objects that may have a name of the job's."""
        kinds = ("Pod", "ConfigMap")
        return any("labels" not in body["metadata"] for kind in kinds for _, body in self.server.all(kind))

    def note(self, text: str) -> None:
        """For the trace."""
        self.trace.append(f"{self.time:8.3f} {text}")

    def _note_change(self, change: Change) -> None:
        body = change.body
        text = f"{change.actor}: {change.type} {change.kind} {body['metadata']['name']}"
        if change.kind == "Pod":
            statuses: list[Raw] = body.get("status", {}).get("containerStatuses") or [{}]
            state = statuses[0].get("state", {})
            text += f" {body.get('status', {}).get('phase')} {'/'.join(state)} on {body['spec'].get('nodeName')}"
            text += " leaving" if "deletionTimestamp" in body["metadata"] else ""
        if change.kind == names.FINETUNEJOB_KIND:
            status = body.get("status", {})
            record = (status.get("attempts") or [{}])[-1]
            text += (
                f" suspend={body['spec'].get('suspend', False)} {status.get('phase')} attempt {status.get('attempt')}"
            )
            text += f" {record.get('state')} created={record.get('created', False)} {record.get('reason', '')}"
        if change.kind == "Event":
            text += f" {body['reason']}: {body['message']}"
        self.note(text)

    def finished(self) -> bool:
        """Complete, Failed, suspended as asked, or deleted."""
        job = self.job
        if job is None:
            return True
        if job["metadata"].get("deletionTimestamp"):
            return all(self.is_lost(pod) for _, pod in self.pods())  # which Kubernetes waits for, without end
        if "completionTime" in self.status:
            return True
        return bool(job["spec"].get("suspend")) and self.condition("Suspended") == "True"

    def condition(self, kind: str) -> str | None:
        """Status of a condition of the job."""
        found = (c["status"] for c in self.status.get("conditions", ()) if c["type"] == kind)
        return next(found, None)

    def is_lost(self, pod: Raw) -> bool:
        """Its machine does not answer."""
        machine = self.machines.machine_of(pod)
        return machine is not None and not machine.up.is_set()


class ErrorLog(logging.Handler):
    """Collects what the operator logs as a bug of its own."""

    def __init__(self, report: Callable[[str], None]) -> None:
        super().__init__(logging.ERROR)
        self._report = report

    def emit(self, record: logging.LogRecord) -> None:
        """One error."""
        self._report(logging.Formatter().format(record))
