"""Follows one job from outside while things break: its status by the API, its steps by the logs in its output."""

from __future__ import annotations

import http.client
import json
import re
import ssl
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from testing.cluster.node.pki import users
from testing.cluster.throwaway import ThrowawayCluster

Raw = dict[str, Any]

POLL_SECONDS = 0.1
_STEP = re.compile(r"^step (\d+)\b(?!.*eval_loss)", re.MULTILINE)
_STRIKE = re.compile(r"^fault strikes at ([\d.]+)$", re.MULTILINE)


@dataclass(frozen=True)
class Sighting:
    """A status that differs from the one before."""

    time: float
    status: Raw


@dataclass(frozen=True)
class Step:
    """A step that node 0 says is done."""

    time: float
    attempt: int
    step: int


class Watch(threading.Thread):
    """Ask again and again; what cannot be had just now is asked for the next time."""

    def __init__(self, cluster: ThrowawayCluster, job: tuple[str, str], output: Path) -> None:
        super().__init__(daemon=True)
        layout, (namespace, name) = cluster.layout, job
        admin = next(user for user in users(layout) if user.name == "admin")
        self._headers = {"Authorization": f"Bearer {admin.token}"}
        self._server = layout.api_server.removeprefix("https://")
        self._context = ssl.create_default_context(cafile=str(layout.pki / "ca.crt"))
        self._path = f"/apis/finetune.dev/v1alpha1/namespaces/{namespace}/finetunejobs/{name}"
        self._connection: http.client.HTTPSConnection | None = None
        self._logs = output / "logs"
        self._read: dict[Path, int] = {}
        self._over = threading.Event()
        self.sightings: list[Sighting] = []
        self.steps: list[Step] = []
        self.struck: float | None = None  # when the program says that it did something wrong

    def run(self) -> None:
        while not self._over.is_set():
            self._look_at_logs()
            with suppress(OSError, http.client.HTTPException, ValueError):
                self._look_at_status()
            time.sleep(POLL_SECONDS)

    def end(self) -> None:
        self._over.set()
        self.join()
        if self._connection is not None:
            self._connection.close()

    @property
    def status(self) -> Raw:
        return self.sightings[-1].status if self.sightings else {}

    @property
    def attempts(self) -> list[Raw]:
        attempts: list[Raw] = self.status.get("attempts", [])
        return attempts

    @property
    def finished(self) -> bool:
        return any(c["type"] == "Finished" and c["status"] == "True" for c in self.status.get("conditions", ()))

    def _look_at_status(self) -> None:
        if self._connection is None:
            self._connection = http.client.HTTPSConnection(self._server, timeout=2, context=self._context)
        connection = self._connection
        self._connection = None  # unless it proves to be of use
        connection.request("GET", self._path, headers=self._headers)
        response = connection.getresponse()
        body = response.read()
        self._connection = connection
        if response.status != 200:
            return
        status = json.loads(body).get("status") or {}
        if status != self.status:
            self.sightings.append(Sighting(time.time(), status))

    def _look_at_logs(self) -> None:
        for path in sorted(self._logs.glob("attempt-*/node-*.log")):
            text = self._new_lines(path)
            if found := _STRIKE.search(text):
                self.struck = self.struck or float(found[1])
            if path.name == "node-0.log":
                attempt = int(path.parent.name.removeprefix("attempt-"))
                self.steps += [Step(time.time(), attempt, int(step)) for step in _STEP.findall(text)]

    def _new_lines(self, path: Path) -> str:
        """Whole lines that were not read before."""
        with path.open("rb") as file:
            file.seek(self._read.get(path, 0))
            whole = file.read().rpartition(b"\n")[0]
        if whole:
            self._read[path] = self._read.get(path, 0) + len(whole) + 1
        return whole.decode(errors="replace")
