"""Reports the state of a node in its termination message and over HTTP."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

from finetune_supervisor import contract
from finetune_supervisor.contract import Node
from finetune_supervisor.error_text import condense_error, find_category
from finetune_supervisor.failures.full_volumes import SHARED_MEMORY, append_full_volumes
from finetune_supervisor.failures.redact import Redactor, find_secrets
from finetune_supervisor.failures.termination_message import write_termination
from finetune_supervisor.launch.child_process import ProcessOutput
from finetune_supervisor.liveness.heartbeat import Heartbeat, read_heartbeats, to_status_progress
from finetune_supervisor.messages import Degradation, TerminationMessage
from finetune_supervisor.status.http_server import NodeSnapshot, start_status_server
from finetune_supervisor.status.log_progress import LogProgress
from finetune_supervisor.status.progress_reports import ProgressReports

_CLAIM_SECONDS = 5.0  # time limit of the last writes to the claim


class NodeReporter:
    """Writes the termination message and starts the HTTP server; both report `outcome`."""

    def __init__(self, node: Node, output: ProcessOutput, *, log_progress: LogProgress | None = None) -> None:
        self._node = node
        self._output = output
        self._log_progress = log_progress
        self._redactor = Redactor(find_secrets(os.environ))
        self.outcome = contract.STARTING
        self._degraded: tuple[Degradation, ...] = ()
        self._has_failed = False

    def start_server(self, reports: ProgressReports | None) -> None:
        """Start the HTTP server of the node; `reports` receives the progress reports of a user command."""
        try:
            start_status_server(self._node, self._take_snapshot, reports=reports)
        except OSError as error:  # training continues without the server
            port = self._node.status_port
            self._output.log(f"cannot listen on port {port}, so there is no /status and no /metrics: {error}")

    def set_degraded(self, degraded: tuple[Degradation, ...]) -> None:
        """Set what slows a user command down, and log each new reason."""
        known_reasons = {degradation.reason for degradation in self._degraded}
        for degradation in degraded:
            if degradation.reason not in known_reasons:
                self._output.log(f"warning: degraded: {degradation.reason}: {degradation.message}")
        self._degraded = degraded

    def _take_snapshot(self) -> NodeSnapshot:
        heartbeats = self._read_heartbeats()
        phase, degraded = (heartbeats[0].phase, heartbeats[0].degraded) if heartbeats else ("", ())
        if problem := self._output.log_problem:
            degraded = (*degraded, Degradation("LogNotCopied", f"the log of this node is incomplete: {problem}"))
        return self._redactor.redact(NodeSnapshot(phase, self.outcome, heartbeats, (*degraded, *self._degraded)))

    def _read_heartbeats(self) -> tuple[Heartbeat, ...]:
        """Return the heartbeats of the ranks, or progress in the output of a command that posts none."""
        heartbeats = read_heartbeats(self._node.run_folder.heartbeats)
        return heartbeats or (self._log_progress.heartbeats if self._log_progress else ())

    def build_running_message(self) -> TerminationMessage:
        """Build the termination message of a node that is still running."""
        heartbeats = self._read_heartbeats()
        peaks = [heartbeat.peak_memory_bytes for heartbeat in heartbeats if heartbeat.peak_memory_bytes is not None]
        return TerminationMessage(
            node_rank=self._node.node_rank,
            attempt=self._node.attempt,
            outcome=self.outcome,
            phase=heartbeats[0].phase if heartbeats else "",
            first_step=heartbeats[0].first_step if heartbeats else None,
            progress=to_status_progress(heartbeats[0]) if heartbeats else None,
            peak_memory_bytes=max(peaks, default=None),
        )

    def write_running_message(self) -> None:
        """Write the termination message of the running node, in case the supervisor is killed."""
        self._write_message(self._redactor.redact(self.build_running_message()))

    def write_final_message(self, message: TerminationMessage) -> None:
        """Classify the error, redact secrets, choose the lines to display, and write and log the message."""
        error, message = message, self._redactor.redact(message)
        volumes = self._list_volumes() if error.outcome == contract.FAILED else ()
        whole_text = append_full_volumes(error.message, volumes)
        shown = condense_error(message.message) + whole_text[len(error.message) :]
        message = replace(message, message=shown, category=find_category(error.error_type, whole_text))
        self.outcome = message.outcome
        self._write_message(message)
        if message.outcome != contract.SUCCEEDED:
            rank = f"rank {message.rank}: " if message.rank is not None else ""
            error_type = f"{message.error_type}: " if message.error_type else ""
            self._output.log(f"{message.outcome}: {rank}{error_type}{message.message}")
        if copy := self._node.final_message:  # the report of a later attempt contains the causes of restarts
            self._output.finish(partial(write_termination, copy, message), seconds=_CLAIM_SECONDS)

    def _write_message(self, message: TerminationMessage) -> None:
        try:
            write_termination(self._node.termination_log, message)
        except OSError as error:
            if not self._has_failed:
                self._output.log(f"the termination message cannot be written: {error}")
            self._has_failed = True

    def _list_volumes(self) -> Iterator[Path]:
        yield from (SHARED_MEMORY, Path(tempfile.gettempdir()), self._node.run_folder.path)
        if self._node.output:
            yield self._node.output
