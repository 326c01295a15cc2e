"""The life of one node of one attempt: prepare, wait for the master, run the program, obey stops, tell the end."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import tempfile
import time
import traceback
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from finetune_supervisor import contract
from finetune_supervisor.contract import Node
from finetune_supervisor.failures.full_volumes import SHARED_MEMORY, name_full
from finetune_supervisor.failures.rank_failures import Failures, RankFailure, first_failure
from finetune_supervisor.failures.redact import redacted, secrets_of
from finetune_supervisor.failures.termination_message import Termination, write_termination
from finetune_supervisor.failures.traceback_parser import explain_all, last_line, read_report
from finetune_supervisor.launch.child_process import Child, Output, SignalInbox
from finetune_supervisor.launch.program import Program, trainer_program, with_flight_recorder
from finetune_supervisor.launch.user_command import Command, InvalidCommand, plan_program
from finetune_supervisor.launch.wait_for_dns import DnsTimeout, wait_for_master
from finetune_supervisor.liveness.hang_detector import Silence, Watch, explain_hang
from finetune_supervisor.liveness.heartbeat import progress_object, read_heartbeats
from finetune_supervisor.liveness.stack_dump import examine, is_still
from finetune_supervisor.status.http_server import Snapshot, serve
from finetune_supervisor.status.progress_reports import Reports
from finetune_supervisor.success_marker import is_finished

OK, FAILED_MAY_RETRY, FAILED_FOR_GOOD, STOPPED_AS_ASKED = 0, 1, 2, 143
_MESSAGE_EVERY_SECONDS = 3.0
_KILL_AFTER_SECONDS = 3.0  # from SIGTERM to SIGKILL


class Supervisor:
    """Runs one node to its end; `run` gives the exit code of the container. Without a command, it is the trainer's."""

    def __init__(self, node: Node, command: Command | None, *, asked_to_stop: int = 0) -> None:
        self._node = node
        self._command = command
        self._outcome = contract.STARTING
        self._inbox = SignalInbox(asked_to_stop)
        self._output = Output(node.log)
        self._reports = Reports(node) if command else None
        self._stopping = _Stopping(grace_seconds=node.grace_seconds)
        self._hang: RankFailure | None = None
        self._secrets = secrets_of(os.environ)

    def run(self) -> int:
        try:
            return self._live()
        except Exception as error:  # the outermost place: PID 1 must not go without last words
            failed = self._failed(type(error).__name__, f"the supervisor itself failed: {error}")
            return self._finish(replace(failed, stack=traceback.format_exc()))

    def _live(self) -> int:
        _clear_leftovers(self._node)
        self._write(self._message())
        if self._command is None and self._is_published():
            self._output.say(f"{self._node.output} holds the result already; nothing is left to do")
            return self._finish(self._succeeded())
        self._serve()
        try:
            program = self._program()
            if not program.meets:
                needed = self._command is not None and self._command.script is not None
                host, node_rank = self._node.master_addr, self._node.node_rank
                wait_for_master(host, node_rank=node_rank, pause=self._pause, needed=needed)
        except InvalidCommand as error:
            return self._finish(self._failed("InvalidSpec", str(error)))
        except DnsTimeout as error:
            return self._finish(self._failed("DnsTimeout", str(error)))
        except _StoppedEarlyError:
            return self._finish(self._stopped("stopped before training began"))
        self._outcome = contract.RUNNING
        child = Child(program, output=self._output)
        code = self._attend(child)
        child.signal(signal.SIGKILL)  # whoever a launcher left behind
        child.wait_for_output(2.0)
        if self._hang is not None:
            return self._finish(self._judge_hang(self._hang))
        return self._finish(self._judge(code) if self._command is None else self._judge_command(code))

    def _program(self) -> Program:
        env = with_flight_recorder(os.environ, self._node)
        if self._command is None or self._reports is None:
            return trainer_program(env)
        return plan_program(self._command, self._node, self._reports.environment(env))

    def _attend(self, child: Child) -> int:
        """Until the program has ended: pass on what it is asked, keep the termination message fresh."""
        written = 0.0
        watch = Watch(limit=self._node.hang_seconds, now=time.monotonic(), is_still=is_still)
        while (code := child.reap()) is None or (self._stopping.asked_at is not None and child.is_left()):
            now = time.monotonic()
            if now - written >= _MESSAGE_EVERY_SECONDS:
                written = now
                self._write(self._message())
            if self._command is None and self._node.run.ranks_began():
                watch.expect(range(self._node.ranks_per_node), now=now)
            watch.listen(read_heartbeats(self._node.run.heartbeats), now=now)
            self._obey(child, now=now, watch=watch)
            self._look_for_hang(child, watch, now=now)
            self._inbox.wait(0.5)
        return code

    def _look_for_hang(self, child: Child, watch: Watch, *, now: float) -> None:
        """Ranks that hang are seen by every node at about the same time, and end on each; nothing is left to save."""
        if self._hang is not None or self._stopping.asked_at is not None:
            return
        silence = watch.silence(now=now)
        if silence is not None:
            self._end_hang(child, watch, silence, now=now)

    def _end_hang(self, child: Child, watch: Watch, silence: Silence, *, now: float) -> None:
        beats = read_heartbeats(self._node.run.heartbeats)
        silent = {beat.local_rank: watch.silent_seconds(beat.local_rank, now=now) for beat in beats}
        odd, said = explain_hang(examine(self._node.run, beats, silent), silence)
        self._hang = RankFailure(
            local_rank=odd.local_rank if odd else None,
            error_type=contract.HANG,
            message=said,
            time=time.time() - (odd.silent_seconds if odd else silence.seconds),
            stack="\n".join(odd.stack) if odd else "",
            victim=odd is not None and not odd.stands_out,
        )
        self._output.say(f"the ranks hang: {said}")
        child.signal(signal.SIGKILL)

    def _obey(self, child: Child, *, now: float, watch: Watch) -> None:
        """The first signal asks for a checkpoint, if there is something to save; the second one ends at once."""
        stopping = self._stopping
        if self._inbox.stops and stopping.asked_at is None:
            if self._hang is None and (silence := watch.nearly(now=now)):  # another node has seen it first
                self._end_hang(child, watch, silence, now=now)
            stopping.asked_at = now
            if self._command is not None:
                self._output.say("asked to stop: SIGTERM is passed on, and the command has the grace period to save")
                child.signal(signal.SIGTERM)
            elif self._phase() in (contract.INIT, contract.LOAD, ""):
                stopping.reason = "stopped before training began"
                stopping.hurry = True
            else:
                self._output.say("asked to stop: the ranks save a checkpoint at the next step and end")
                self._node.run.stop_request.touch()
                self._write(self._message())
        if self._inbox.stops > 1 and not stopping.hurry:
            stopping.reason = "asked twice to stop; nothing was saved"
            stopping.hurry = True
        if stopping.is_late(now) and not stopping.hurry:
            stopping.reason = (
                f"the ranks did not end within the grace period of {self._node.grace_seconds:.0f}s"
                " (FINETUNE_GRACE_SECONDS)"
            )
            stopping.hurry = True
        if stopping.hurry and stopping.terminated_at is None:
            stopping.terminated_at = now
            self._output.say(stopping.reason)
            child.signal(signal.SIGTERM)
        if stopping.terminated_at is not None and now > stopping.terminated_at + _KILL_AFTER_SECONDS:
            child.signal(signal.SIGKILL)

    def _judge(self, code: int) -> Termination:
        phases = {beat.phase for beat in read_heartbeats(self._node.run.heartbeats)}
        if (code == 0 and phases == {contract.DONE}) or self._is_published():
            return self._succeeded()
        if phases == {contract.STOPPED}:
            return self._stopped("stopped as asked; a checkpoint was saved")
        if self._stopping.hurry:
            return self._stopped(self._stopping.reason)
        failure = first_failure(self._node.run)
        if self._stopping.asked_at is not None and (failure is None or failure.victim):
            return self._stopped("stopped, but other nodes ended before a checkpoint was saved")
        if failure is not None:
            return self._rank_failed(failure)
        if code == 0:
            return self._failed("RankExited", "the ranks ended without an error and without a result")
        what = f"ended by signal {-code}" if code < 0 else f"exited with code {code}"
        return self._failed(
            "LauncherFailed", f"the launcher {what}; the end of its output:\n{self._output.tail()[-1500:]}"
        )

    def _judge_hang(self, hang: RankFailure) -> Termination:
        return self._succeeded() if self._is_published() else self._rank_failed(hang)

    def _is_published(self) -> bool:
        """Then the job is done, even if its ranks crash or hang while they take their leave, as libraries of theirs may
        make them do."""
        return self._node.output is not None and is_finished(self._node.output, uid=self._node.uid)

    def _judge_command(self, code: int) -> Termination:
        """Exit 0 is success, unless it was asked for: many scripts save at SIGTERM and then end well."""
        if self._stopping.asked_at is not None:
            return self._stopped(self._stopping.reason or "stopped as asked")
        if code == 0:
            return self._succeeded()
        tail = self._output.tail()

        def rank_of(failure: RankFailure) -> int | None:
            return None if failure.local_rank is None else self._node.global_rank(failure.local_rank)

        def by_rank(failures: Failures) -> Failures:
            return explain_all(failures, tail, rank_of=rank_of)

        failure = first_failure(self._node.run, explain=by_rank) or read_report(tail, code=code, time=time.time())
        if failure.error_type != "RankExited":
            return self._rank_failed(failure)
        said = f"exited with code {failure.exit_code}; its last line: {last_line(tail, rank=rank_of(failure))}"
        return self._rank_failed(replace(failure, message=said, stack=tail))

    def _finish(self, message: Termination) -> int:
        message = redacted(message, self._secrets)
        self._outcome = message.outcome
        self._write(message)
        if message.outcome == contract.SUCCEEDED:
            return OK
        who = f"rank {message.rank}: " if message.rank is not None else ""
        what = f"{message.error_type}: " if message.error_type else ""
        self._output.say(f"{message.outcome}: {who}{what}{message.message}")
        if message.outcome == contract.STOPPED:
            return STOPPED_AS_ASKED
        return FAILED_FOR_GOOD if message.error_type in contract.USER_ERRORS else FAILED_MAY_RETRY

    def _message(self) -> Termination:
        """What can be said now, before the end is known."""
        beats = read_heartbeats(self._node.run.heartbeats)
        peaks = [beat.peak_memory_bytes for beat in beats if beat.peak_memory_bytes is not None]
        return Termination(
            node_rank=self._node.node_rank,
            attempt=self._node.attempt,
            outcome=self._outcome,
            phase=beats[0].phase if beats else "",
            first_step=beats[0].first_step if beats else None,
            progress=progress_object(beats[0]) if beats else None,
            peak_memory_bytes=max(peaks, default=None),
        )

    def _succeeded(self) -> Termination:
        return replace(self._message(), final=True, outcome=contract.SUCCEEDED, phase=contract.DONE, time=time.time())

    def _stopped(self, reason: str) -> Termination:
        return replace(self._message(), final=True, outcome=contract.STOPPED, message=reason, time=time.time())

    def _failed(self, error_type: str, message: str) -> Termination:
        return replace(
            self._message(),
            final=True,
            outcome=contract.FAILED,
            error_type=error_type,
            message=message,
            time=time.time(),
        )

    def _rank_failed(self, failure: RankFailure) -> Termination:
        return replace(
            self._failed(failure.error_type, name_full(failure.message, self._volumes())),
            rank=None if failure.local_rank is None else self._node.global_rank(failure.local_rank),
            local_rank=failure.local_rank,
            stack=failure.stack[-3000:],
            exit_code=failure.exit_code,
            signal=failure.signal,
            victim=failure.victim,
            time=failure.time,
        )

    def _volumes(self) -> Iterator[Path]:
        yield from (SHARED_MEMORY, Path(tempfile.gettempdir()), self._node.run.path)
        if self._node.output:
            yield self._node.output

    def _write(self, message: Termination) -> None:
        try:
            write_termination(self._node.termination_log, message)
        except OSError as error:
            self._output.say(f"the termination message cannot be written: {error}")

    def _serve(self) -> None:
        try:
            serve(self._node, self._snapshot, reports=self._reports)
        except OSError as error:  # the job is worth more than its gauges
            self._output.say(f"port {self._node.status_port} cannot be served, so there is no /status: {error}")

    def _snapshot(self) -> Snapshot:
        return Snapshot(self._phase(), self._outcome, read_heartbeats(self._node.run.heartbeats))

    def _phase(self) -> str:
        beats = read_heartbeats(self._node.run.heartbeats)
        return beats[0].phase if beats else ""

    def _pause(self, seconds: float) -> None:
        """Between two questions to DNS; a stop request ends the wait."""
        until = time.monotonic() + seconds
        while not self._inbox.stops and (left := until - time.monotonic()) > 0:
            self._inbox.wait(left)
        if self._inbox.stops:
            raise _StoppedEarlyError


class _StoppedEarlyError(Exception):
    """Asked to stop while waiting for the master."""


class _Stopping:
    """Where a stop request stands."""

    def __init__(self, *, grace_seconds: float) -> None:
        self._limit_seconds = grace_seconds - min(5.0, grace_seconds / 2)
        self.asked_at: float | None = None
        self.terminated_at: float | None = None
        self.hurry = False  # end now, saved or not
        self.reason = ""

    def is_late(self, now: float) -> bool:
        return self.asked_at is not None and now > self.asked_at + self._limit_seconds


def _clear_leftovers(node: Node) -> None:
    """What an earlier life of this container left: our files, and shared memory, which counts against the limit."""
    for folder in (node.run.heartbeats, node.run.torchrun, node.run.stacks):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
    for file in (node.run.exits, node.run.launcher_error, node.run.stop_request):
        file.unlink(missing_ok=True)
    if os.getpid() == 1:  # not on somebody's laptop
        for entry in Path("/dev/shm").iterdir():  # noqa: S108
            with contextlib.suppress(OSError):  # a folder, or somebody else's
                entry.unlink()
