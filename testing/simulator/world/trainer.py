"""Simulated trainer, whose processes train, publish checkpoints and results, and exit."""

import asyncio
import json
from collections import defaultdict
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from pydantic import TypeAdapter

from finetune_api.termination import Outcome, Termination
from finetune_api.v1alpha1.reasons import Reason
from finetune_api.v1alpha1.status import Progress
from testing.simulator.world.choices import Choices
from testing.simulator.world.output_volume import LockLost, Publication, SimulatedOutputFolder

EPOCH = datetime(2026, 1, 1, 12, 0, tzinfo=UTC)
KILLED, STOPPED = 137, 143
FORGED_STEP = 1_000_000
_PROGRESS = TypeAdapter(Progress)


@dataclass(frozen=True)
class Workload:
    """Duration, checkpoints and timeouts of the simulated training."""

    num_nodes: int  # nodes of the first attempt
    total_steps: int = 6
    step_seconds: float = 2.0
    save_steps: int = 2
    rendezvous_timeout_seconds: float = 120.0
    hang_timeout_seconds: float = 60.0  # time without a step until the supervisors kill their ranks


@dataclass(frozen=True)
class ContainerExit:
    """Exit code, termination message and reason of a container."""

    code: int
    termination: Termination
    reason: str = ""
    raw_message: str = ""  # replaces the termination message, because user code can write any text


class TrainerProcess:
    """The trainer process of one node."""

    def __init__(
        self,
        *,
        job_uid: str,
        attempt: int,
        node_rank: int,
        num_nodes: int,
        rendezvous: str,
        pod_uid: str,
        spec_job_uids: frozenset[str] = frozenset(),
        has_forged_spec: bool = False,
    ) -> None:
        self.job_uid = job_uid
        self.attempt = attempt
        self.num_nodes = num_nodes
        self.node_rank = node_rank
        self.rendezvous = rendezvous
        self.pod_uid = pod_uid
        self.spec_job_uids = spec_job_uids  # owners of the mounted ConfigMaps
        self.has_forged_spec = has_forged_spec
        self.stop_requests = 0
        self.exit_future: asyncio.Future[ContainerExit] = asyncio.get_running_loop().create_future()
        self.end_time = 0.0

    @property
    def is_running(self) -> bool:
        """Whether the process runs, regardless of what the API server shows."""
        return not self.exit_future.done()


class TrainingGroup:
    """Processes that joined one rendezvous and train together."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.members: dict[int, TrainerProcess] = {}
        self.state = "waiting"  # waiting -> training -> ended
        self.first_step = 0
        self.first_step_time: datetime | None = None
        self.step = 0
        self.task: asyncio.Task[None] | None = None
        self.can_step = asyncio.Event()  # cleared while a rank hangs
        self.can_step.set()
        self.hanging_process: TrainerProcess | None = None  # None if a network partition blocks the training

    @property
    def attempt(self) -> int:
        """Attempt of rank 0, which publishes the checkpoints."""
        return self.members[0].attempt


class Trainer:
    """All trainer processes of the job and of earlier jobs of the same name, with their output folders."""

    def __init__(self, workload: Workload, choices: Choices) -> None:
        self.folders: defaultdict[str, SimulatedOutputFolder] = defaultdict(SimulatedOutputFolder)  # keyed by job uid
        self.processes: list[TrainerProcess] = []
        # (job uid, attempt) -> process whose exit or hang stopped the training
        self.root_causes: dict[tuple[str, int], TrainerProcess] = {}
        self.reached_steps: defaultdict[str, int] = defaultdict(int)  # highest step of any attempt, by job uid
        self.poisoned_responses: dict[str, bytes] = {}  # /status responses that user code forged, by job uid
        self._workload = workload
        self._choices = choices
        self._groups: defaultdict[str, list[TrainingGroup]] = defaultdict(list)  # keyed by rendezvous
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, process: TrainerProcess) -> TrainerProcess:
        """Start the process of a container."""
        self.processes.append(process)
        self._spawn(self._run_process(process))
        return process

    def kill(self, process: TrainerProcess, *, reason: str = "Error", code: int = KILLED) -> None:
        """Kill the process; its termination message remains the last one that was written periodically."""
        self._end(
            process,
            ContainerExit(code, self._build_termination_message(process, Outcome.RUNNING, is_final=False), reason),
        )

    def exit_with_message(self, process: TrainerProcess, message: str) -> None:
        """Make the process exit with code 1 and any text as its termination message."""
        self._end(process, ContainerExit(1, Termination(), "Error", raw_message=message))

    def fail(self, process: TrainerProcess, *, error_type: str, message: str, **details: Any) -> None:
        """Make a rank fail with an error or a signal that its supervisor reports."""
        termination = self._build_termination_message(
            process, Outcome.FAILED, error_type=error_type, message=message, **details
        )
        self._end(process, ContainerExit(1 if "signal" in details else 2, termination))

    def hang(self, process: TrainerProcess) -> None:
        """Make a rank of the process hang, so that all other ranks wait."""
        if group := self._find_training_group(process):
            group.hanging_process = process
            self._stop_steps(group)

    def partition(self, process: TrainerProcess) -> Callable[[], None]:
        """Disconnect the process from its peers and return a function that reconnects it."""
        group = self._find_training_group(process)
        if group is None or len(group.members) == 1:
            return lambda: None
        self._stop_steps(group)
        return lambda: None if group.hanging_process else group.can_step.set()

    def exit_early(self, process: TrainerProcess) -> None:
        """Make the process exit with code 0 without reporting success."""
        self._end(process, ContainerExit(0, self._build_termination_message(process, Outcome.RUNNING, is_final=False)))

    def terminate(self, process: TrainerProcess, grace_seconds: float) -> None:
        """Send SIGTERM, and SIGKILL after the grace period."""
        self._spawn(self._handle_sigterm(process, grace_seconds))

    def list_attempts_per_rendezvous(self) -> list[set[int]]:
        """Return the attempts whose processes joined each rendezvous."""
        groups = (group for groups in self._groups.values() for group in groups)
        return [{process.attempt for process in group.members.values()} for group in groups]

    def render_status(self, process: TrainerProcess) -> bytes:
        """Return the /status response of the process, whose progress is missing before the first step."""
        if poisoned := self.poisoned_responses.get(process.job_uid):
            return poisoned
        group = self._find_training_group(process)
        body: dict[str, Any] = {"uid": process.job_uid, "attempt": process.attempt}
        if group is not None:
            body["progress"] = _PROGRESS.dump_python(self._build_progress(group), mode="json", by_alias=True)
        return json.dumps(body).encode()

    def render_forged_status(self, job_uid: str) -> bytes:
        """Return a /status response with a step that no process has reached."""
        attempts = [process.attempt for process in self.processes if process.job_uid == job_uid]
        progress = Progress(step=FORGED_STEP, total_steps=FORGED_STEP, update_time=EPOCH + timedelta(days=1))
        body = {"uid": job_uid, "attempt": max(attempts, default=0)}
        return json.dumps({**body, "progress": _PROGRESS.dump_python(progress, mode="json", by_alias=True)}).encode()

    async def _run_process(self, process: TrainerProcess) -> None:
        if self.folders[process.job_uid].has_result:
            await asyncio.sleep(1.0)
            self._succeed(process)
            return
        group = self._find_waiting_group(process)
        if group is None:
            await self._time_out_rendezvous(process, 20.0)
            return
        group.members[process.node_rank] = process
        if len(group.members) == process.num_nodes and all(p.is_running for p in group.members.values()):
            group.state = "training"
            group.task = self._spawn(self._train(group))
        else:
            await self._time_out_rendezvous(process, self._workload.rendezvous_timeout_seconds, group)

    def _find_waiting_group(self, process: TrainerProcess) -> TrainingGroup | None:
        """Return the group that waits for this rank, or None if the newest group is already training."""
        groups = self._groups[process.rendezvous]
        newest = groups[-1] if groups else None
        if newest is None or not any(member.is_running for member in newest.members.values()):
            newest = TrainingGroup(number=len(groups))
            groups.append(newest)
        existing = newest.members.get(process.node_rank)
        return newest if newest.state == "waiting" and (existing is None or not existing.is_running) else None

    async def _time_out_rendezvous(
        self, process: TrainerProcess, seconds: float, group: TrainingGroup | None = None
    ) -> None:
        await asyncio.wait((process.exit_future,), timeout=seconds)
        if process.is_running and (group is None or group.state == "waiting"):
            self.fail(
                process, error_type="RendezvousTimeoutError", message="the other nodes did not join the rendezvous"
            )

    async def _train(self, group: TrainingGroup) -> None:
        members = list(group.members.values())
        folder = self.folders[members[0].job_uid]
        try:
            folder.take_lock(group.attempt)
            group.step = group.first_step = folder.step
            while group.step < self._workload.total_steps:
                await asyncio.sleep(self._workload.step_seconds)
                await group.can_step.wait()
                group.step += 1
                group.first_step_time = group.first_step_time or _read_time()
                self.reached_steps[members[0].job_uid] = max(self.reached_steps[members[0].job_uid], group.step)
                stop = any(process.stop_requests for process in members)
                if stop or group.step % self._workload.save_steps == 0:
                    folder.save(self._build_publication(group, f"step-{group.step:08d}"), step=group.step)
                if stop:
                    group.state = "ended"
                    for process in members:
                        self._end_as_stopped(process, "stopped by SIGTERM; a checkpoint was saved")
                    return
            folder.finish(self._build_publication(group, "result"))
        except LockLost:
            group.state = "ended"
            for process in members:
                self.fail(process, error_type="OutputError", message="a newer attempt holds the lock of the output")
            return
        group.state = "ended"
        for process in members:
            await asyncio.sleep(self._choices.pick((0.0, 0.1, 1.5)))
            self._succeed(process)

    def _build_publication(self, group: TrainingGroup, content: str) -> Publication:
        return Publication(group.attempt, group.number, content, asyncio.get_running_loop().time())

    async def _handle_sigterm(self, process: TrainerProcess, grace_seconds: float) -> None:
        process.stop_requests += 1
        group = self._find_group(process)
        if group is not None and not group.can_step.is_set():
            await asyncio.sleep(min(3.0, grace_seconds))
            self._report_hang(group, process)
        ignores_sigterm = group is not None and group.state == "ended" and self._choices.draw_boolean(20)
        if process.stop_requests > 1 or group is None or group.state == "waiting":
            await asyncio.sleep(0.5)
            if not ignores_sigterm:
                self._end_as_stopped(process, "stopped before training began")
        elif group.state == "ended":
            await asyncio.sleep(min(3.0, grace_seconds))
            if not ignores_sigterm:
                self._end_as_stopped(process, "stopped, but other nodes ended before a checkpoint was saved")
        await asyncio.wait((process.exit_future,), timeout=grace_seconds)
        self.kill(process)

    def _find_group(self, process: TrainerProcess) -> TrainingGroup | None:
        return next((g for g in self._groups[process.rendezvous] if process in g.members.values()), None)

    def _find_training_group(self, process: TrainerProcess) -> TrainingGroup | None:
        group = self._find_group(process)
        return group if group is not None and group.state == "training" else None

    def _stop_steps(self, group: TrainingGroup) -> None:
        group.can_step.clear()
        self._spawn(self._detect_hang(group))

    async def _detect_hang(self, group: TrainingGroup) -> None:
        """Make each supervisor detect the hang independently, in random order."""
        with suppress(TimeoutError):
            await asyncio.wait_for(group.can_step.wait(), self._workload.hang_timeout_seconds)
        members = list(group.members.values())
        while members and not group.can_step.is_set():
            member = members.pop(self._choices.draw_number(len(members)))
            await asyncio.sleep(self._choices.pick((0.0, 0.3, 2.0)))
            self._report_hang(group, member)

    def _report_hang(self, group: TrainingGroup, process: TrainerProcess) -> None:
        if process.is_running and not group.can_step.is_set():
            is_victim = group.hanging_process is not process
            message = "waited for the other ranks" if is_victim else "a rank hangs"
            self.fail(process, error_type=Reason.HANG, message=message, victim=is_victim)

    def _succeed(self, process: TrainerProcess) -> None:
        self._end(process, ContainerExit(0, self._build_termination_message(process, Outcome.SUCCEEDED), "Completed"))

    def _end_as_stopped(self, process: TrainerProcess, message: str) -> None:
        self._end(
            process, ContainerExit(STOPPED, self._build_termination_message(process, Outcome.STOPPED, message=message))
        )

    def _end(self, process: TrainerProcess, exit_result: ContainerExit) -> None:
        if not process.is_running:
            return
        process.end_time = asyncio.get_running_loop().time()
        process.exit_future.set_result(exit_result)
        group = self._find_group(process)
        if group is None or group.state != "training":
            return
        group.state = "ended"
        self.root_causes[process.job_uid, process.attempt] = group.hanging_process or process
        if group.task is not None:
            group.task.cancel()
        for member in group.members.values():
            # A quarter of the peers hang instead of failing.
            if member.is_running and member is not group.hanging_process and not self._choices.draw_boolean(25):
                self._spawn(self._fail_as_victim(member))

    async def _fail_as_victim(self, process: TrainerProcess) -> None:
        await asyncio.sleep(self._choices.pick((0.05, 0.5, 3.0)))
        if process.is_running:
            self.fail(process, error_type="DistBackendError", message="connection closed by peer", victim=True)

    def _build_termination_message(
        self, process: TrainerProcess, outcome: Outcome, *, is_final: bool = True, **details: Any
    ) -> Termination:
        group = self._find_group(process)
        now = asyncio.get_running_loop().time()
        progress = self._build_progress(group) if group is not None and group.state != "waiting" else None
        return Termination(
            final=is_final,
            outcome=outcome,
            node_rank=process.node_rank,
            attempt=process.attempt,
            time=(EPOCH + timedelta(seconds=now)).timestamp() if is_final else None,
            first_step=group.first_step if group and progress else None,
            progress=progress,
            **details,
        )

    def _build_progress(self, group: TrainingGroup) -> Progress:
        saved_step = self.folders[group.members[0].job_uid].step
        return Progress(
            step=group.step,
            first_step=group.first_step,
            first_step_time=group.first_step_time,
            total_steps=self._workload.total_steps,
            last_checkpoint=f"step-{saved_step:08d}" if saved_step else None,
            update_time=_read_time(),
        )

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def _read_time() -> datetime:
    return EPOCH + timedelta(seconds=asyncio.get_running_loop().time())
