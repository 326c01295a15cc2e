"""Record the status and the training steps of a job while a fault is injected."""

from __future__ import annotations

import re
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from testing.cluster.kubectl_proxy import ApiUnavailable, KubectlProxy, RequestRejected

RawBody = dict[str, Any]

POLL_SECONDS = 0.1
_STEP = re.compile(r"^step (\d+)\b(?!.*eval_loss)", re.MULTILINE)
_INJECTION = re.compile(r"^fault injected at ([\d.]+)$", re.MULTILINE)


@dataclass(frozen=True)
class StatusChange:
    """A status that differs from the previous one, with the time at which it was read."""

    time: float
    status: RawBody


@dataclass(frozen=True)
class RecordedStep:
    """A training step in the log of node 0, with the time at which it was read."""

    time: float
    attempt: int
    step: int


class JobRecorder(threading.Thread):
    """Thread that polls the status from the API and the steps from the logs; each poll retries a failed request."""

    def __init__(self, api: KubectlProxy, job: tuple[str, str], output: Path) -> None:
        super().__init__(daemon=True)
        namespace, name = job
        self._api = api
        self._path = f"/apis/finetune.dev/v1alpha1/namespaces/{namespace}/finetunejobs/{name}"
        self._logs = output / "logs"
        self._read_bytes: dict[Path, int] = {}
        self._stop_requested = threading.Event()
        self.status_changes: list[StatusChange] = []
        self.steps: list[RecordedStep] = []
        self.injected_at: float | None = None  # Unix time of the injection, from the log of the program

    def run(self) -> None:
        while not self._stop_requested.is_set():
            self._read_logs()
            with suppress(ApiUnavailable, RequestRejected):
                self._read_status()
            time.sleep(POLL_SECONDS)

    def stop(self) -> None:
        self._stop_requested.set()
        self.join()

    @property
    def status(self) -> RawBody:
        return self.status_changes[-1].status if self.status_changes else {}

    @property
    def attempts(self) -> list[RawBody]:
        attempts: list[RawBody] = self.status.get("attempts", [])
        return attempts

    @property
    def is_finished(self) -> bool:
        return any(c["type"] == "Finished" and c["status"] == "True" for c in self.status.get("conditions", ()))

    def _read_status(self) -> None:
        status = self._api.send("GET", self._path, timeout_seconds=2).get("status") or {}
        if status != self.status:
            self.status_changes.append(StatusChange(time.time(), status))

    def _read_logs(self) -> None:
        for path in sorted(self._logs.glob("attempt-*/node-*.log")):
            text = self._read_new_lines(path)
            if match := _INJECTION.search(text):
                self.injected_at = self.injected_at or float(match[1])
            if path.name == "node-0.log":
                attempt = int(path.parent.name.removeprefix("attempt-"))
                self.steps += [RecordedStep(time.time(), attempt, int(step)) for step in _STEP.findall(text)]

    def _read_new_lines(self, path: Path) -> str:
        """Return the complete lines appended since the last call."""
        with path.open("rb") as file:
            file.seek(self._read_bytes.get(path, 0))
            complete_lines = file.read().rpartition(b"\n")[0]
        if complete_lines:
            self._read_bytes[path] = self._read_bytes.get(path, 0) + len(complete_lines) + 1
        return complete_lines.decode(errors="replace")
