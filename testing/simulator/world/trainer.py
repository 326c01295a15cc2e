"""Processes of the trainer, from the outside: when they train, how they end and what they leave behind."""

import asyncio
from collections import defaultdict
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from finetune_api.termination import Outcome, Termination
from finetune_api.v1alpha1.reasons import Reason
from finetune_api.v1alpha1.status import Progress
from testing.simulator.world.choices import Choices
from testing.simulator.world.output_volume import Folder, LockLost, Publication

EPOCH = datetime(2026, 1, 1, 12, 0, tzinfo=UTC)
KILLED, STOPPED = 137, 143


@dataclass(frozen=True)
class Workload:
    """What a job has to do."""

    num_nodes: int  # at first
    total_steps: int = 6
    step_seconds: float = 2.0
    save_steps: int = 2
    patience_seconds: float = 120.0  # of a node that waits for the others
    hang_seconds: float = 60.0  # without a step, until the supervisors end their ranks


@dataclass(frozen=True)
class Exit:
    """How a container ended."""

    code: int
    said: Termination
    reason: str = ""


class Process:
    """The trainer of one node."""

    def __init__(
        self, *, job_uid: str, attempt: int, node_rank: int, num_nodes: int, rendezvous: str, pod_uid: str
    ) -> None:
        self.job_uid = job_uid
        self.attempt = attempt
        self.num_nodes = num_nodes
        self.node_rank = node_rank
        self.rendezvous = rendezvous
        self.pod_uid = pod_uid
        self.stop_requests = 0
        self.ended: asyncio.Future[Exit] = asyncio.get_running_loop().create_future()
        self.end_time = 0.0

    @property
    def alive(self) -> bool:
        """It runs, whoever knows."""
        return not self.ended.done()


class Group:
    """The processes that met at one rendezvous and trained, or will train, together."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.members: dict[int, Process] = {}
        self.state = "waiting"  # then training, then broken
        self.first_step = 0
        self.step = 0
        self.task: asyncio.Task[None] | None = None
        self.moving = asyncio.Event()  # no rank hangs
        self.moving.set()
        self.culprit: Process | None = None  # whose rank hangs; None while it is a link that does

    @property
    def attempt(self) -> int:
        """Rank 0 publishes."""
        return self.members[0].attempt


class Trainer:
    """All processes of a job and of those that had its name before, and their folders."""

    def __init__(self, workload: Workload, choices: Choices) -> None:
        self.folders: defaultdict[str, Folder] = defaultdict(Folder)  # by the job's uid
        self.processes: list[Process] = []
        # by the job's uid and attempt: whose end, or hang, was that of its training
        self.causes: dict[tuple[str, int], Process] = {}
        self._workload = workload
        self._choices = choices
        self._groups: defaultdict[str, list[Group]] = defaultdict(list)  # by rendezvous
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, process: Process) -> Process:
        """A container's start."""
        self.processes.append(process)
        self._spawn(self._begin(process))
        return process

    def kill(self, process: Process, *, reason: str = "Error", code: int = KILLED) -> None:
        """From outside: no last words but those written now and then."""
        self._end(process, Exit(code, self._words(process, Outcome.RUNNING, final=False), reason))

    def fail(self, process: Process, *, error_type: str, message: str, **more: Any) -> None:
        """A rank raises, or is killed by a signal while its supervisor lives."""
        said = self._words(process, Outcome.FAILED, error_type=error_type, message=message, **more)
        self._end(process, Exit(1 if "signal" in more else 2, said))

    def hang(self, process: Process) -> None:
        """A rank of it does nothing any more, and all others wait for that."""
        if group := self._training(process):
            group.culprit = process
            self._halt(group)

    def cut_off(self, process: Process) -> Callable[[], None]:
        """The others do not hear of it any more; gives what mends the link."""
        group = self._training(process)
        if group is None or len(group.members) == 1:
            return lambda: None
        self._halt(group)
        return lambda: None if group.culprit else group.moving.set()

    def exit_early(self, process: Process) -> None:
        """Exit 0 without a word about success."""
        self._end(process, Exit(0, self._words(process, Outcome.RUNNING, final=False)))

    def terminate(self, process: Process, grace_seconds: float) -> None:
        """SIGTERM, and SIGKILL once the grace is over."""
        self._spawn(self._stop(process, grace_seconds))

    def meetings(self) -> list[set[int]]:
        """The attempts whose processes met, for each group of them."""
        groups = (group for groups in self._groups.values() for group in groups)
        return [{process.attempt for process in group.members.values()} for group in groups]

    def progress(self, job_uid: str) -> Progress | None:
        """What node rank 0 of the job's newest group that trains would answer, if asked."""
        groups = (group for groups in self._groups.values() for group in groups if group.state == "training")
        training = [group for group in groups if group.members[0].job_uid == job_uid]
        return self._progress(training[-1]) if training else None

    async def _begin(self, process: Process) -> None:
        if self.folders[process.job_uid].result:
            await asyncio.sleep(1.0)
            self._succeed(process)
            return
        group = self._group_for(process)
        if group is None:
            await self._lonely(process, 20.0)
            return
        group.members[process.node_rank] = process
        if len(group.members) == process.num_nodes and all(p.alive for p in group.members.values()):
            group.state = "training"
            group.task = self._spawn(self._train(group))
        else:
            await self._lonely(process, self._workload.patience_seconds, group)

    def _group_for(self, process: Process) -> Group | None:
        """The attempt's group that still waits for this rank; who comes to a group that has begun waits in vain."""
        groups = self._groups[process.rendezvous]
        newest = groups[-1] if groups else None
        if newest is None or not any(member.alive for member in newest.members.values()):
            newest = Group(number=len(groups))
            groups.append(newest)
        there = newest.members.get(process.node_rank)
        return newest if newest.state == "waiting" and (there is None or not there.alive) else None

    async def _lonely(self, process: Process, seconds: float, group: Group | None = None) -> None:
        await asyncio.wait((process.ended,), timeout=seconds)
        if process.alive and (group is None or group.state == "waiting"):
            self.fail(process, error_type="RendezvousTimeoutError", message="the other nodes did not come")

    async def _train(self, group: Group) -> None:
        members = list(group.members.values())
        folder = self.folders[members[0].job_uid]
        try:
            folder.take_lock(group.attempt)
            group.step = group.first_step = folder.step
            while group.step < self._workload.total_steps:
                await asyncio.sleep(self._workload.step_seconds)
                await group.moving.wait()
                group.step += 1
                stop = any(process.stop_requests for process in members)
                if stop or group.step % self._workload.save_steps == 0:
                    folder.save(self._publication(group, f"step-{group.step:08d}"), step=group.step)
                if stop:
                    group.state = "broken"
                    for process in members:
                        self._end_stopped(process, "stopped as asked; a checkpoint was saved")
                    return
            folder.finish(self._publication(group, "result"))
        except LockLost:
            group.state = "broken"
            for process in members:
                self.fail(process, error_type="OutputError", message="a newer attempt has the lock of the output")
            return
        group.state = "broken"
        for process in members:
            await asyncio.sleep(self._choices.pick((0.0, 0.1, 1.5)))
            self._succeed(process)

    def _publication(self, group: Group, what: str) -> Publication:
        return Publication(group.attempt, group.number, what, asyncio.get_running_loop().time())

    async def _stop(self, process: Process, grace_seconds: float) -> None:
        process.stop_requests += 1
        group = self._group_of(process)
        if group is not None and not group.moving.is_set():
            await asyncio.sleep(min(3.0, grace_seconds))
            self._tell_hang(group, process)
        deaf = group is not None and group.state == "broken" and self._choices.chance(20)
        if process.stop_requests > 1 or group is None or group.state == "waiting":
            await asyncio.sleep(0.5)
            if not deaf:
                self._end_stopped(process, "stopped before training began")
        elif group.state == "broken":
            await asyncio.sleep(min(3.0, grace_seconds))
            if not deaf:
                self._end_stopped(process, "stopped, but other nodes ended before a checkpoint was saved")
        await asyncio.wait((process.ended,), timeout=grace_seconds)
        self.kill(process)

    def _group_of(self, process: Process) -> Group | None:
        return next((g for g in self._groups[process.rendezvous] if process in g.members.values()), None)

    def _training(self, process: Process) -> Group | None:
        group = self._group_of(process)
        return group if group is not None and group.state == "training" else None

    def _halt(self, group: Group) -> None:
        group.moving.clear()
        self._spawn(self._notice_hang(group))

    async def _notice_hang(self, group: Group) -> None:
        """Every supervisor finds it out by its own clock."""
        with suppress(TimeoutError):
            await asyncio.wait_for(group.moving.wait(), self._workload.hang_seconds)
        members = list(group.members.values())
        while members and not group.moving.is_set():
            member = members.pop(self._choices.number(len(members)))
            await asyncio.sleep(self._choices.pick((0.0, 0.3, 2.0)))
            self._tell_hang(group, member)

    def _tell_hang(self, group: Group, process: Process) -> None:
        if process.alive and not group.moving.is_set():
            waits = group.culprit is not process
            words = "waited for the others" if waits else "a rank stands still"
            self.fail(process, error_type=Reason.HANG, message=words, victim=waits)

    def _succeed(self, process: Process) -> None:
        self._end(process, Exit(0, self._words(process, Outcome.SUCCEEDED), "Completed"))

    def _end_stopped(self, process: Process, why: str) -> None:
        self._end(process, Exit(STOPPED, self._words(process, Outcome.STOPPED, message=why)))

    def _end(self, process: Process, how: Exit) -> None:
        if not process.alive:
            return
        process.end_time = asyncio.get_running_loop().time()
        process.ended.set_result(how)
        group = self._group_of(process)
        if group is None or group.state != "training":
            return
        group.state = "broken"
        self.causes[process.job_uid, process.attempt] = group.culprit or process
        if group.task is not None:
            group.task.cancel()
        for member in group.members.values():
            if member.alive and member is not group.culprit and not self._choices.chance(25):  # the rest hangs
                self._spawn(self._lose_peer(member))

    async def _lose_peer(self, process: Process) -> None:
        await asyncio.sleep(self._choices.pick((0.05, 0.5, 3.0)))
        if process.alive:
            self.fail(process, error_type="DistBackendError", message="connection closed by peer", victim=True)

    def _words(self, process: Process, outcome: Outcome, *, final: bool = True, **more: Any) -> Termination:
        group = self._group_of(process)
        now = asyncio.get_running_loop().time()
        progress = self._progress(group) if group is not None and group.state != "waiting" else None
        return Termination(
            final=final,
            outcome=outcome,
            node_rank=process.node_rank,
            attempt=process.attempt,
            time=(EPOCH + timedelta(seconds=now)).timestamp() if final else None,
            first_step=group.first_step if group and progress else None,
            progress=progress,
            **more,
        )

    def _progress(self, group: Group) -> Progress:
        saved = self.folders[group.members[0].job_uid].step
        return Progress(
            step=group.step,
            total_steps=self._workload.total_steps,
            last_checkpoint=f"step-{saved:08d}" if saved else None,
            update_time=EPOCH + timedelta(seconds=asyncio.get_running_loop().time()),
        )

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
