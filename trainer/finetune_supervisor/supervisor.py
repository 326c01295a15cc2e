"""Supervisor of one node in one attempt: runs the program, handles stop requests and reports the outcome.

`stop_request` and `judge` make the decisions without I/O; this module executes them.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import time
import traceback
from dataclasses import replace
from pathlib import Path

from finetune_supervisor import contract
from finetune_supervisor.command_checks.command_checks import CommandChecks, CommandState
from finetune_supervisor.command_checks.gpu_memory import GpuMemoryReader
from finetune_supervisor.command_checks.rank_processes import find_connected_ranks, find_rank_processes
from finetune_supervisor.contract import Node
from finetune_supervisor.failures.rank_failures import RankFailure, read_failures
from finetune_supervisor.failures.termination_message import write_termination
from finetune_supervisor.judge import (
    FinishedNode,
    build_failure_message,
    build_stop_message,
    build_success_message,
    get_container_exit_code,
    judge,
)
from finetune_supervisor.launch.child_process import ChildProcess, ProcessOutput, SignalInbox
from finetune_supervisor.launch.config_files import ConfigMapReplaced
from finetune_supervisor.launch.program import LaunchProgram, enable_flight_recorder, plan_trainer_program
from finetune_supervisor.launch.user_command import InvalidCommand, UserCommand, plan_program
from finetune_supervisor.launch.wait_for_dns import DnsTimeout, wait_for_master
from finetune_supervisor.liveness.hang_detector import (
    HangDetector,
    HeartbeatTimeout,
    explain_hang,
    may_be_reported_by_launcher,
)
from finetune_supervisor.liveness.heartbeat import read_heartbeats
from finetune_supervisor.liveness.stack_dump import inspect_ranks, is_stopped_or_dead, read_activity
from finetune_supervisor.messages import TerminationMessage
from finetune_supervisor.safe_files import open_folder
from finetune_supervisor.status.log_progress import LogProgress
from finetune_supervisor.status.node_reporter import NodeReporter
from finetune_supervisor.status.progress_reports import ProgressReports
from finetune_supervisor.stop_request import StopAction, StopRequest
from finetune_supervisor.success_marker import is_result_published

_MESSAGE_INTERVAL_SECONDS = 3.0


class Supervisor:
    """Runs the program of one node until it ends.

    `command`: None to run finetune_trainer. `early_signal_count`: number of stop signals received before construction.
    """

    def __init__(self, node: Node, command: UserCommand | None, *, early_signal_count: int = 0) -> None:
        self._node = node
        self._command = command
        self._inbox = SignalInbox(early_signal_count)
        self._output = ProcessOutput(node.log)
        # The operator displays only the progress of node rank 0.
        reads_log = command is not None and command.reads_log and node.node_rank == 0
        self._log_progress = LogProgress(node) if reads_log else None
        self._reporter = NodeReporter(node, self._output, log_progress=self._log_progress)
        self._reports = ProgressReports(node) if command else None
        self._stop = StopRequest(grace_seconds=node.grace_seconds)
        self._hang: RankFailure | None = None

    def run(self) -> int:
        """Run the node, write its final termination message and return the exit code of the container."""
        try:
            final_message = self._run_node()
        except Exception as error:  # catch everything, because PID 1 must always write a termination message
            final_message = self._build_failure_message(type(error).__name__, f"the supervisor itself failed: {error}")
            final_message = replace(final_message, stack=traceback.format_exc())
        self._reporter.write_final_message(final_message)
        return get_container_exit_code(final_message)

    def _run_node(self) -> TerminationMessage:
        # Remove files of an earlier container, and write a first termination message.
        _remove_leftovers(self._node)
        self._reporter.write_running_message()
        # Skip the run if an earlier container has already published the result.
        if self._command is None and self._is_published():
            self._output.log(f"{self._node.output} already contains the result; nothing is left to do")
            return build_success_message(self._reporter.build_running_message(), now=time.time())
        self._reporter.start_server(self._reports)
        # Plan the program, and wait for node rank 0 unless the program includes a rendezvous.
        try:
            program = self._plan_program()
            if not program.has_own_rendezvous:
                is_name_required = self._command is not None and self._command.script is not None
                host, node_rank = self._node.master_addr, self._node.node_rank
                wait_for_master(host, node_rank=node_rank, pause=self._pause, is_name_required=is_name_required)
        except InvalidCommand as error:
            return self._build_failure_message("InvalidSpec", str(error))
        except DnsTimeout as error:
            return self._build_failure_message("DnsTimeout", str(error))
        except _StoppedBeforeStartError:
            return build_stop_message(
                self._reporter.build_running_message(), "stopped before training began", now=time.time()
            )
        # Run the program until it ends.
        self._reporter.outcome = contract.RUNNING
        child = ChildProcess(program, output=self._output)
        code = self._watch_program(child)
        # Kill remaining child processes, and read the rest of the output.
        child.signal(signal.SIGKILL)
        child.wait_for_output(2.0)
        if self._log_progress is not None:
            self._log_progress.finish(self._output)
        # Derive the final termination message.
        return judge(self._observe_finished_node(code))

    def _plan_program(self) -> LaunchProgram:
        env = enable_flight_recorder(os.environ, self._node)
        if self._command is None or self._reports is None:
            return plan_trainer_program(env)
        if self._node.output is not None:  # a command may write there at once, and reports a volume that fails
            with contextlib.suppress(OSError), open_folder(self._node.output):
                pass
        return plan_program(self._command, self._node, self._reports.add_report_variables(env))

    def _watch_program(self, child: ChildProcess) -> int:
        """Handle stop requests and hangs until the program has ended, and return its exit code."""
        written_at = 0.0
        checks = _build_command_checks(self._node, child.pid) if self._command else None
        detector = HangDetector(
            limit_seconds=self._node.hang_seconds,
            now=time.monotonic(),
            is_stopped=is_stopped_or_dead,
            read_activity=read_activity,
        )
        while (code := child.reap()) is None or (self._stop.is_requested and child.has_survivors()):
            now = time.monotonic()
            # Update the termination message, in case the supervisor is killed.
            if now - written_at >= _MESSAGE_INTERVAL_SECONDS:
                written_at = now
                self._reporter.write_running_message()
            # Record heartbeats; ranks of the trainer must send them from the start.
            if self._command is None and self._node.run_folder.have_ranks_started():
                detector.expect_heartbeats(range(self._node.ranks_per_node), now=now)
            heartbeats = read_heartbeats(self._node.run_folder.heartbeats)
            detector.record_heartbeats(heartbeats, now=now)
            # Read the progress in the output of a command that posts none.
            if self._log_progress is not None and not heartbeats:
                self._log_progress.update(self._output, now=now)
            # Look for ranks that train alone and for unused GPUs.
            if checks is not None:
                self._reporter.set_degraded(checks.update(now=now))
            # Handle hangs, then stop requests.
            self._check_for_hang(child, detector, now=now)
            self._advance_stop_request(child, phase=heartbeats[0].phase if heartbeats else "", now=now)
            self._inbox.wait(0.5)
        return code

    def _check_for_hang(self, child: ChildProcess, detector: HangDetector, *, now: float) -> None:
        """Kill the ranks without saving a checkpoint if one of them hangs.

        All nodes detect a hang at about the same time. If a stop signal arrives when a rank has used more
        than 80 % of its limit, another node has probably detected the same hang first.
        """
        if self._hang is not None or self._stop.is_requested:
            return
        timeout = detector.find_near_timeout(now=now) if self._inbox.stop_count else detector.find_timeout(now=now)
        if timeout is not None:
            self._kill_hung_ranks(child, detector, timeout, now=now)

    def _kill_hung_ranks(
        self, child: ChildProcess, detector: HangDetector, timeout: HeartbeatTimeout, *, now: float
    ) -> None:
        heartbeats = read_heartbeats(self._node.run_folder.heartbeats)
        silent_seconds = {
            heartbeat.local_rank: detector.get_silent_seconds(heartbeat.local_rank, now=now) for heartbeat in heartbeats
        }
        ranks = inspect_ranks(self._node.run_folder, heartbeats, silent_seconds)
        if may_be_reported_by_launcher(ranks, timeout):
            return
        suspect, message = explain_hang(ranks, timeout)
        self._hang = RankFailure(
            local_rank=suspect.local_rank if suspect else None,
            error_type=contract.HANG,
            message=message,
            time=time.time() - (suspect.silent_seconds if suspect else timeout.silent_seconds),
            stack="\n".join(suspect.stack) if suspect else "",
            victim=suspect is not None and not suspect.is_suspicious,
        )
        self._output.log(f"the ranks hang: {message}")
        child.signal(signal.SIGKILL)

    def _advance_stop_request(self, child: ChildProcess, *, phase: str, now: float) -> None:
        self._stop, actions = self._stop.advance(
            signal_count=self._inbox.stop_count, phase=phase, is_command=self._command is not None, now=now
        )
        for action in actions:
            self._perform_stop_action(action, child)

    def _perform_stop_action(self, action: StopAction, child: ChildProcess) -> None:
        if action is StopAction.FORWARD:
            self._output.log("stop requested: SIGTERM is forwarded; the command has the grace period to save")
            child.signal(signal.SIGTERM)
        elif action is StopAction.SAVE:
            self._output.log("stop requested: the ranks save a checkpoint at the next step and end")
            self._node.run_folder.stop_request.touch()
            self._reporter.write_running_message()
        elif action is StopAction.TERMINATE:
            self._output.log(self._stop.reason)
            child.signal(signal.SIGTERM)
        else:
            child.signal(signal.SIGKILL)

    def _observe_finished_node(self, code: int) -> FinishedNode:
        return FinishedNode(
            node=self._node,
            running_message=self._reporter.build_running_message(),
            exit_code=code,
            time=time.time(),
            stop_request=self._stop,
            is_command=self._command is not None,
            is_published=self._is_published(),
            hang=self._hang,
            phases=frozenset(heartbeat.phase for heartbeat in read_heartbeats(self._node.run_folder.heartbeats)),
            failures=read_failures(self._node.run_folder),
            output_tail=self._output.read_tail(),
        )

    def _is_published(self) -> bool:
        return self._node.output is not None and is_result_published(self._node.output, uid=self._node.uid)

    def _build_failure_message(self, error_type: str, message: str) -> TerminationMessage:
        return build_failure_message(self._reporter.build_running_message(), error_type, message, now=time.time())

    def _pause(self, seconds: float) -> None:
        """Sleep between DNS lookups. Raises _StoppedBeforeStartError if a stop signal arrives."""
        deadline = time.monotonic() + seconds
        while not self._inbox.stop_count and (remaining := deadline - time.monotonic()) > 0:
            self._inbox.wait(remaining)
        if self._inbox.stop_count:
            raise _StoppedBeforeStartError


class _StoppedBeforeStartError(Exception):
    """The node was stopped while it waited for node rank 0."""


def _build_command_checks(node: Node, program_pid: int) -> CommandChecks:
    gpu_memory = GpuMemoryReader()

    def observe() -> CommandState:
        processes = find_rank_processes(program_pid, master_port=node.master_port)
        return CommandState(
            ranks=frozenset(process.rank for process in processes),
            connected_ranks=find_connected_ranks(processes),
            gpu_bytes=gpu_memory.read_used_bytes(),
        )

    return CommandChecks(node, observe, planned_gpus=int(os.environ.get(contract.GPUS, "0")))


def report_replaced_config(node: Node, error: ConfigMapReplaced) -> int:
    """Write the termination message of a node that runs nothing, and return the exit code of the container."""
    message = TerminationMessage(node_rank=node.node_rank, attempt=node.attempt)
    message = build_failure_message(message, contract.CONFIG_MAP_REPLACED, str(error), now=time.time())
    write_termination(node.termination_log, message)
    print(f"supervisor: {error}", file=sys.stderr)
    return get_container_exit_code(message)


def _remove_leftovers(node: Node) -> None:
    """Remove files and shared memory left by an earlier container of this pod.

    Shared memory counts against the memory limit of the pod.
    """
    for folder in (node.run_folder.heartbeats, node.run_folder.error_files, node.run_folder.stack_dumps):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
    for file in (node.run_folder.rank_exits, node.run_folder.launcher_error, node.run_folder.stop_request):
        file.unlink(missing_ok=True)
    if os.getpid() == 1:  # only in a container; local mode must not delete shared memory of other programs
        for entry in Path("/dev/shm").iterdir():  # noqa: S108
            with contextlib.suppress(OSError):  # folders and files of other users cannot be deleted
                entry.unlink()
