"""Supervises one node of one attempt: prepare, wait for node rank 0, run the program, handle stops, report the end."""

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
from finetune_supervisor.failures.full_volumes import SHARED_MEMORY, append_full_volumes
from finetune_supervisor.failures.rank_failures import Failures, RankFailure, find_first_failure
from finetune_supervisor.failures.redact import find_secrets, redact_termination
from finetune_supervisor.failures.termination_message import write_termination
from finetune_supervisor.failures.traceback_parser import explain_failures, find_last_line, parse_failure_report
from finetune_supervisor.launch.child_process import ChildProcess, ProcessOutput, SignalInbox
from finetune_supervisor.launch.program import LaunchProgram, enable_flight_recorder, trainer_program
from finetune_supervisor.launch.user_command import InvalidCommand, UserCommand, plan_program
from finetune_supervisor.launch.wait_for_dns import DnsTimeout, wait_for_master
from finetune_supervisor.liveness.hang_detector import HangDetector, HeartbeatTimeout, explain_hang
from finetune_supervisor.liveness.heartbeat import read_heartbeats, to_status_progress
from finetune_supervisor.liveness.stack_dump import inspect_ranks, is_stopped_or_dead
from finetune_supervisor.messages import TerminationMessage
from finetune_supervisor.status.http_server import Snapshot, start_status_server
from finetune_supervisor.status.progress_reports import ProgressReports
from finetune_supervisor.success_marker import is_result_published

EXIT_SUCCEEDED, EXIT_RETRYABLE, EXIT_PERMANENT, EXIT_STOPPED = 0, 1, 2, 143
_MESSAGE_INTERVAL_SECONDS = 3.0
_SIGKILL_DELAY_SECONDS = 3.0  # after SIGTERM


class Supervisor:
    """Runs one node until it ends; `run` returns the exit code of the container.

    `command` is None if the node runs finetune_trainer. `early_stops`: stop signals received before construction.
    """

    def __init__(self, node: Node, command: UserCommand | None, *, early_stops: int = 0) -> None:
        self._node = node
        self._command = command
        self._outcome = contract.STARTING
        self._inbox = SignalInbox(early_stops)
        self._output = ProcessOutput(node.log)
        self._reports = ProgressReports(node) if command else None
        self._stop = _StopRequest(grace_seconds=node.grace_seconds)
        self._hang: RankFailure | None = None
        self._secrets = find_secrets(os.environ)

    def run(self) -> int:
        """Run the node and write its final termination message, also if the supervisor itself fails."""
        try:
            return self._run_node()
        except Exception as error:  # outermost handler: PID 1 must always leave a termination message
            failed = self._failed(type(error).__name__, f"the supervisor itself failed: {error}")
            return self._finish(replace(failed, stack=traceback.format_exc()))

    def _run_node(self) -> int:
        # Prepare: remove files of an earlier container, write a first message.
        _remove_leftovers(self._node)
        self._write(self._current_message())
        # A retried pod may find the result complete.
        if self._command is None and self._is_published():
            self._output.log(f"{self._node.output} already contains the result; nothing is left to do")
            return self._finish(self._succeeded())
        self._start_server()
        # Choose the program; wait for node rank 0 if the program has no rendezvous of its own.
        try:
            program = self._plan_program()
            if not program.does_own_rendezvous:
                required = self._command is not None and self._command.script is not None
                host, node_rank = self._node.master_addr, self._node.node_rank
                wait_for_master(host, node_rank=node_rank, pause=self._pause, required=required)
        except InvalidCommand as error:
            return self._finish(self._failed("InvalidSpec", str(error)))
        except DnsTimeout as error:
            return self._finish(self._failed("DnsTimeout", str(error)))
        except _StoppedEarlyError:
            return self._finish(self._stopped("stopped before training began"))
        # Run it until it ends.
        self._outcome = contract.RUNNING
        child = ChildProcess(program, output=self._output)
        code = self._watch(child)
        # Kill processes that a launcher left behind, and read the rest of the output.
        child.signal(signal.SIGKILL)
        child.wait_for_output(2.0)
        # Derive the outcome.
        if self._hang is not None:
            return self._finish(self._judge_hang(self._hang))
        return self._finish(self._judge_trainer(code) if self._command is None else self._judge_command(code))

    def _plan_program(self) -> LaunchProgram:
        env = enable_flight_recorder(os.environ, self._node)
        if self._command is None or self._reports is None:
            return trainer_program(env)
        return plan_program(self._command, self._node, self._reports.add_environment(env))

    def _watch(self, child: ChildProcess) -> int:
        """Forward stop requests, detect hangs and refresh the termination message until the program has ended."""
        written_at = 0.0
        detector = HangDetector(limit=self._node.hang_seconds, now=time.monotonic(), is_stopped=is_stopped_or_dead)
        while (code := child.reap()) is None or (self._stop.requested_at is not None and child.has_survivors()):
            now = time.monotonic()
            # Refresh the termination message, for the case that the supervisor is killed.
            if now - written_at >= _MESSAGE_INTERVAL_SECONDS:
                written_at = now
                self._write(self._current_message())
            # Record heartbeats; the trainer's ranks owe one from their start on.
            if self._command is None and self._node.run.have_ranks_started():
                detector.expect(range(self._node.ranks_per_node), now=now)
            detector.record(read_heartbeats(self._node.run.heartbeats), now=now)
            # Act on stop requests, then on hangs.
            self._handle_stop_request(child, now=now, detector=detector)
            self._check_for_hang(child, detector, now=now)
            self._inbox.wait(0.5)
        return code

    def _check_for_hang(self, child: ChildProcess, detector: HangDetector, *, now: float) -> None:
        """End the ranks if one hangs. All nodes detect a hang at about the same time; there is nothing left to save."""
        if self._hang is not None or self._stop.requested_at is not None:
            return
        timeout = detector.find_timeout(now=now)
        if timeout is not None:
            self._end_hung_ranks(child, detector, timeout, now=now)

    def _end_hung_ranks(
        self, child: ChildProcess, detector: HangDetector, timeout: HeartbeatTimeout, *, now: float
    ) -> None:
        beats = read_heartbeats(self._node.run.heartbeats)
        silent_seconds = {beat.local_rank: detector.silent_seconds(beat.local_rank, now=now) for beat in beats}
        suspect, message = explain_hang(inspect_ranks(self._node.run, beats, silent_seconds), timeout)
        self._hang = RankFailure(
            local_rank=suspect.local_rank if suspect else None,
            error_type=contract.HANG,
            message=message,
            time=time.time() - (suspect.silent_seconds if suspect else timeout.silent_seconds),
            stack="\n".join(suspect.stack) if suspect else "",
            victim=suspect is not None and not suspect.stands_out,
        )
        self._output.log(f"the ranks hang: {message}")
        child.signal(signal.SIGKILL)

    def _handle_stop_request(self, child: ChildProcess, *, now: float, detector: HangDetector) -> None:
        """The first signal requests a checkpoint, if there is something to save; the second one ends at once."""
        stop = self._stop
        # First signal: ask the program to save, unless it hangs or has nothing to save yet.
        if self._inbox.stops and stop.requested_at is None:
            if self._hang is None and (
                timeout := detector.find_near_timeout(now=now)
            ):  # another node detected it first
                self._end_hung_ranks(child, detector, timeout, now=now)
            stop.requested_at = now
            if self._command is not None:
                self._output.log("stop requested: SIGTERM is forwarded; the command has the grace period to save")
                child.signal(signal.SIGTERM)
            elif self._phase() in (contract.INIT, contract.LOAD, ""):
                stop.reason = "stopped before training began"
                stop.force_stop = True
            else:
                self._output.log("stop requested: the ranks save a checkpoint at the next step and end")
                self._node.run.stop_request.touch()
                self._write(self._current_message())
        # Second signal, or grace period over: end without saving.
        if self._inbox.stops > 1 and not stop.force_stop:
            stop.reason = "stopped by a second signal; no checkpoint was saved"
            stop.force_stop = True
        if stop.is_grace_over(now) and not stop.force_stop:
            stop.reason = (
                f"the ranks did not end within the grace period of {self._node.grace_seconds:.0f}s"
                " (FINETUNE_GRACE_SECONDS)"
            )
            stop.force_stop = True
        # SIGTERM, then SIGKILL.
        if stop.force_stop and stop.terminated_at is None:
            stop.terminated_at = now
            self._output.log(stop.reason)
            child.signal(signal.SIGTERM)
        if stop.terminated_at is not None and now > stop.terminated_at + _SIGKILL_DELAY_SECONDS:
            child.signal(signal.SIGKILL)

    def _judge_trainer(self, code: int) -> TerminationMessage:
        phases = {beat.phase for beat in read_heartbeats(self._node.run.heartbeats)}
        if (code == 0 and phases == {contract.DONE}) or self._is_published():
            return self._succeeded()
        if phases == {contract.STOPPED}:
            return self._stopped("stopped on request; a checkpoint was saved")
        if self._stop.force_stop:
            return self._stopped(self._stop.reason)
        failure = find_first_failure(self._node.run)
        if self._stop.requested_at is not None and (failure is None or failure.victim):
            return self._stopped("stopped, but other nodes ended before a checkpoint was saved")
        if failure is not None:
            return self._rank_failed(failure)
        if code == 0:
            return self._failed("RankExited", "the ranks ended without an error and without a result")
        ending = f"ended by signal {-code}" if code < 0 else f"exited with code {code}"
        return self._failed(
            "LauncherFailed", f"the launcher {ending}; the end of its output:\n{self._output.tail()[-1500:]}"
        )

    def _judge_hang(self, hang: RankFailure) -> TerminationMessage:
        return self._succeeded() if self._is_published() else self._rank_failed(hang)

    def _is_published(self) -> bool:
        """Return whether the result is complete. Then the job succeeded, even if its ranks crash or hang on shutdown,
        as some of their libraries do."""
        return self._node.output is not None and is_result_published(self._node.output, uid=self._node.uid)

    def _judge_command(self, code: int) -> TerminationMessage:
        """Exit code 0 is success unless a stop was requested: many scripts save at SIGTERM and then exit with 0."""
        if self._stop.requested_at is not None:
            return self._stopped(self._stop.reason or "stopped on request")
        if code == 0:
            return self._succeeded()
        tail = self._output.tail()

        def rank_of(failure: RankFailure) -> int | None:
            return None if failure.local_rank is None else self._node.global_rank(failure.local_rank)

        def explain_by_rank(failures: Failures) -> Failures:
            return explain_failures(failures, tail, rank_of=rank_of)

        failure = find_first_failure(self._node.run, explain=explain_by_rank) or parse_failure_report(
            tail, code=code, time=time.time()
        )
        if failure.error_type != "RankExited":
            return self._rank_failed(failure)
        last_line = find_last_line(tail, rank=rank_of(failure))
        message = f"exited with code {failure.exit_code}; its last line: {last_line}"
        return self._rank_failed(replace(failure, message=message, stack=tail))

    def _finish(self, message: TerminationMessage) -> int:
        """Write the final message without secrets and return the exit code of the container."""
        message = redact_termination(message, self._secrets)
        self._outcome = message.outcome
        self._write(message)
        if message.outcome == contract.SUCCEEDED:
            return EXIT_SUCCEEDED
        rank = f"rank {message.rank}: " if message.rank is not None else ""
        error_type = f"{message.error_type}: " if message.error_type else ""
        self._output.log(f"{message.outcome}: {rank}{error_type}{message.message}")
        if message.outcome == contract.STOPPED:
            return EXIT_STOPPED
        return EXIT_PERMANENT if message.error_type in contract.USER_ERRORS else EXIT_RETRYABLE

    def _current_message(self) -> TerminationMessage:
        """Return the message for a node that has not ended yet."""
        beats = read_heartbeats(self._node.run.heartbeats)
        peaks = [beat.peak_memory_bytes for beat in beats if beat.peak_memory_bytes is not None]
        return TerminationMessage(
            node_rank=self._node.node_rank,
            attempt=self._node.attempt,
            outcome=self._outcome,
            phase=beats[0].phase if beats else "",
            first_step=beats[0].first_step if beats else None,
            progress=to_status_progress(beats[0]) if beats else None,
            peak_memory_bytes=max(peaks, default=None),
        )

    def _succeeded(self) -> TerminationMessage:
        return replace(
            self._current_message(), final=True, outcome=contract.SUCCEEDED, phase=contract.DONE, time=time.time()
        )

    def _stopped(self, reason: str) -> TerminationMessage:
        return replace(self._current_message(), final=True, outcome=contract.STOPPED, message=reason, time=time.time())

    def _failed(self, error_type: str, message: str) -> TerminationMessage:
        return replace(
            self._current_message(),
            final=True,
            outcome=contract.FAILED,
            error_type=error_type,
            message=message,
            time=time.time(),
        )

    def _rank_failed(self, failure: RankFailure) -> TerminationMessage:
        return replace(
            self._failed(failure.error_type, append_full_volumes(failure.message, self._volumes())),
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

    def _write(self, message: TerminationMessage) -> None:
        try:
            write_termination(self._node.termination_log, message)
        except OSError as error:
            self._output.log(f"the termination message cannot be written: {error}")

    def _start_server(self) -> None:
        try:
            start_status_server(self._node, self._snapshot, reports=self._reports)
        except OSError as error:  # missing metrics must not stop the training
            port = self._node.status_port
            self._output.log(f"cannot listen on port {port}, so there is no /status and no /metrics: {error}")

    def _snapshot(self) -> Snapshot:
        return Snapshot(self._phase(), self._outcome, read_heartbeats(self._node.run.heartbeats))

    def _phase(self) -> str:
        beats = read_heartbeats(self._node.run.heartbeats)
        return beats[0].phase if beats else ""

    def _pause(self, seconds: float) -> None:
        """Sleep between two DNS lookups. Raises _StoppedEarlyError if a stop is requested meanwhile."""
        deadline = time.monotonic() + seconds
        while not self._inbox.stops and (remaining := deadline - time.monotonic()) > 0:
            self._inbox.wait(remaining)
        if self._inbox.stops:
            raise _StoppedEarlyError


class _StoppedEarlyError(Exception):
    """A stop was requested while the node waited for node rank 0."""


class _StopRequest:
    """State of a stop request; `grace_seconds` is the time between SIGTERM and the kubelet's SIGKILL."""

    def __init__(self, *, grace_seconds: float) -> None:
        self._limit_seconds = grace_seconds - min(5.0, grace_seconds / 2)
        self.requested_at: float | None = None
        self.terminated_at: float | None = None
        self.force_stop = False  # end now, whether or not a checkpoint was saved
        self.reason = ""

    def is_grace_over(self, now: float) -> bool:
        return self.requested_at is not None and now > self.requested_at + self._limit_seconds


def _remove_leftovers(node: Node) -> None:
    """Remove the files of an earlier container of this pod, and shared memory, which counts against its limit."""
    for folder in (node.run.heartbeats, node.run.torchrun, node.run.stacks):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
    for file in (node.run.exits, node.run.launcher_error, node.run.stop_request):
        file.unlink(missing_ok=True)
    if os.getpid() == 1:  # in a container; local mode must not touch shared memory of other programs
        for entry in Path("/dev/shm").iterdir():  # noqa: S108
            with contextlib.suppress(OSError):  # a folder, or owned by another user
                entry.unlink()
