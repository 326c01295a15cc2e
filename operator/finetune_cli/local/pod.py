"""A pod that is a process: started, stopped and shown as the API server would show it."""

import asyncio
import os
import signal
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from finetune_api.termination import MAX_BYTES
from finetune_cli.local.environment import LOOPBACK
from finetune_cli.local.parent_watchdog import Guard
from finetune_operator import names

Raw = dict[str, Any]

K8S_NODE = "localhost"
LOG_TAIL_BYTES = 2048  # of a container that left no message, as FallbackToLogsOnError has it


@dataclass(frozen=True)
class Program:
    """What a pod runs here and where it leaves its traces."""

    command: tuple[str, ...]
    environment: Mapping[str, str]
    termination_log: Path
    console_log: Path
    kept_open: int  # a file descriptor that lives as long as the process


class LocalPod:
    """One node. `on_change` hears (before, after) as an informer would; after None, the object is gone."""

    def __init__(self, manifest: Raw, guard: Guard, *, on_change: Callable[[Raw | None, Raw | None], None]) -> None:
        self._guard = guard
        self._on_change = on_change
        now = _stamp(datetime.now(UTC))
        metadata = {**manifest["metadata"], "uid": str(uuid.uuid4()), "creationTimestamp": now}
        spec = {**manifest["spec"], "nodeName": K8S_NODE}
        self._started_at = now
        self._stop_timer: asyncio.TimerHandle | None = None
        self._end: asyncio.Task[None] | None = None
        self._process: asyncio.subprocess.Process | None = None
        self.body: Raw = {**manifest, "metadata": metadata, "spec": spec, "status": {"phase": "Pending"}}

    @property
    def uid(self) -> str:
        return str(self.body["metadata"]["uid"])

    @property
    def ended(self) -> bool:
        return self.body["status"]["phase"] in ("Succeeded", "Failed")

    async def start(self, program: Program) -> None:
        """Run the program in a session of its own: a Ctrl-C in the terminal is ours to pass on, not the kernel's."""
        program.termination_log.unlink(missing_ok=True)
        with program.console_log.open("wb") as console:
            self._process = await asyncio.create_subprocess_exec(
                *program.command,
                env=program.environment,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=console,
                stderr=asyncio.subprocess.STDOUT,
                start_new_session=True,
                pass_fds=(program.kept_open,),
            )
        self._guard.watch(self._process.pid)
        self._show({"phase": "Running", "podIP": LOOPBACK}, {"running": {"startedAt": self._started_at}})
        self._end = asyncio.create_task(self._wait(program))

    def stop(self, *, grace_seconds: int) -> None:
        """SIGTERM now, SIGKILL after the grace; asked again with less grace, it is told again and gets less."""
        if self.ended or self._process is None:
            self._remove()
            return
        deadline = datetime.now(UTC) + timedelta(seconds=grace_seconds)
        stopping = self.body["metadata"].get("deletionTimestamp")
        if stopping and datetime.fromisoformat(stopping) <= deadline:
            return
        self._change({**self.body, "metadata": {**self.body["metadata"], "deletionTimestamp": _stamp(deadline)}})
        self._signal(signal.SIGTERM)
        if self._stop_timer is not None:
            self._stop_timer.cancel()
        self._stop_timer = asyncio.get_running_loop().call_later(grace_seconds, self.kill)

    def kill(self) -> None:
        """End every process of it at once."""
        self._signal(signal.SIGKILL)

    async def wait(self) -> None:
        """Until its process has ended."""
        if self._end is not None:
            await self._end

    async def _wait(self, program: Program) -> None:
        assert self._process is not None
        code = await self._process.wait()
        self._guard.forget(self._process.pid)
        self._signal(signal.SIGKILL)  # whoever is left of its process group
        if self._stop_timer is not None:
            self._stop_timer.cancel()
        exit_code = code if code >= 0 else 128 - code
        terminated = {
            "exitCode": exit_code,
            "reason": "Error" if exit_code else "Completed",
            "startedAt": self._started_at,
            "finishedAt": _stamp(datetime.now(UTC)),
            "message": _last_words(program, failed=exit_code != 0),
        }
        self._show({"phase": "Failed" if exit_code else "Succeeded", "podIP": LOOPBACK}, {"terminated": terminated})
        if self.body["metadata"].get("deletionTimestamp"):
            self._remove()

    def _signal(self, number: signal.Signals) -> None:
        """To the whole group for SIGKILL, else to the supervisor alone, as the kubelet does."""
        assert self._process is not None
        try:
            if number is signal.SIGKILL:
                os.killpg(self._process.pid, number)
            elif self._process.returncode is None:
                self._process.send_signal(number)
        except (ProcessLookupError, PermissionError):  # macOS says EPERM of a group of zombies
            return

    def _show(self, status: Raw, state: Raw) -> None:
        container = {"name": names.CONTAINER, "ready": "running" in state, "restartCount": 0, "state": state}
        self._change({**self.body, "status": {**status, "containerStatuses": [container]}})

    def _change(self, after: Raw) -> None:
        before, self.body = self.body, after
        self._on_change(before, after)

    def _remove(self) -> None:
        self._on_change(self.body, None)


def _last_words(program: Program, *, failed: bool) -> str:
    """The termination message, or the end of the log of one that failed without a word."""
    said = _tail(program.termination_log, MAX_BYTES)
    return said or (_tail(program.console_log, LOG_TAIL_BYTES) if failed else "")


def _tail(path: Path, limit: int) -> str:
    try:
        return path.read_bytes()[-limit:].decode("utf-8", "replace")
    except OSError:
        return ""


def _stamp(time: datetime) -> str:
    return time.isoformat().replace("+00:00", "Z")
