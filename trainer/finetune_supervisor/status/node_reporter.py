"""Reports the state of a node: its termination message, and over HTTP while it runs."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from finetune_supervisor import contract
from finetune_supervisor.contract import Node
from finetune_supervisor.failures.full_volumes import SHARED_MEMORY, append_full_volumes
from finetune_supervisor.failures.redact import find_secrets, redact_termination
from finetune_supervisor.failures.termination_message import write_termination
from finetune_supervisor.launch.child_process import ProcessOutput
from finetune_supervisor.liveness.heartbeat import read_heartbeats, to_status_progress
from finetune_supervisor.messages import TerminationMessage
from finetune_supervisor.status.http_server import Snapshot, start_status_server
from finetune_supervisor.status.progress_reports import ProgressReports


class NodeReporter:
    """Writes the termination message and serves /status and /metrics; `outcome` is part of both."""

    def __init__(self, node: Node, output: ProcessOutput) -> None:
        self._node = node
        self._output = output
        self._secrets = find_secrets(os.environ)
        self.outcome = contract.STARTING

    def start_server(self, reports: ProgressReports | None) -> None:
        """Serve /status and /metrics, and receive the progress reports of a command."""
        try:
            start_status_server(self._node, self._snapshot, reports=reports)
        except OSError as error:  # missing metrics must not stop the training
            port = self._node.status_port
            self._output.log(f"cannot listen on port {port}, so there is no /status and no /metrics: {error}")

    def _snapshot(self) -> Snapshot:
        beats = read_heartbeats(self._node.run.heartbeats)
        return Snapshot(beats[0].phase if beats else "", self.outcome, beats)

    def running_message(self) -> TerminationMessage:
        """Return the message for a node that has not ended yet."""
        beats = read_heartbeats(self._node.run.heartbeats)
        peaks = [beat.peak_memory_bytes for beat in beats if beat.peak_memory_bytes is not None]
        return TerminationMessage(
            node_rank=self._node.node_rank,
            attempt=self._node.attempt,
            outcome=self.outcome,
            phase=beats[0].phase if beats else "",
            first_step=beats[0].first_step if beats else None,
            progress=to_status_progress(beats[0]) if beats else None,
            peak_memory_bytes=max(peaks, default=None),
        )

    def write_running(self) -> None:
        """Write the message of the running node, which remains if the supervisor is killed."""
        self._write(self.running_message())

    def write_final(self, final: TerminationMessage) -> None:
        """Write and log the final message, with the names of full volumes and without secrets."""
        if final.outcome == contract.FAILED:
            final = replace(final, message=append_full_volumes(final.message, self._volumes()))
        final = redact_termination(final, self._secrets)
        self.outcome = final.outcome
        self._write(final)
        if final.outcome != contract.SUCCEEDED:
            rank = f"rank {final.rank}: " if final.rank is not None else ""
            error_type = f"{final.error_type}: " if final.error_type else ""
            self._output.log(f"{final.outcome}: {rank}{error_type}{final.message}")

    def _write(self, message: TerminationMessage) -> None:
        try:
            write_termination(self._node.termination_log, message)
        except OSError as error:
            self._output.log(f"the termination message cannot be written: {error}")

    def _volumes(self) -> Iterator[Path]:
        yield from (SHARED_MEMORY, Path(tempfile.gettempdir()), self._node.run.path)
        if self._node.output:
            yield self._node.output
