"""Runs a pod as a local process and maintains its object as the API server would."""

import asyncio
import os
import signal
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from finetune_cli.local.environment import LOOPBACK
from finetune_cli.local.parent_watchdog import ParentWatchdog
from finetune_operator import names
from finetune_operator.kube.informer import ChangeHandler
from finetune_operator.observation.ownership import RawBody
from finetune_supervisor.contract import MAX_TERMINATION_BYTES

K8S_NODE = "localhost"
LOG_TAIL_BYTES = 2048  # limit of the kubelet for terminationMessagePolicy FallbackToLogsOnError


@dataclass(frozen=True)
class NodeProcessSpec:
    """Command, environment and output files of a node's process."""

    command: tuple[str, ...]
    environment: Mapping[str, str]
    termination_log: Path
    console_log: Path
    inherited_lock: int  # file descriptor that the process keeps open until it ends


class LocalPod:
    """Pod of one node. Calls `on_change(old_body, new_body)` like an Informer; new_body is None after a deletion."""

    def __init__(self, manifest: RawBody, watchdog: ParentWatchdog, *, on_change: ChangeHandler) -> None:
        self._watchdog = watchdog
        self._on_change = on_change
        now = _format_time(datetime.now(UTC))
        metadata = {**manifest["metadata"], "uid": str(uuid.uuid4()), "creationTimestamp": now}
        spec = {**manifest["spec"], "nodeName": K8S_NODE}
        self._started_at = now
        self._stop_timer: asyncio.TimerHandle | None = None
        self._end_task: asyncio.Task[None] | None = None
        self._process: asyncio.subprocess.Process | None = None
        self.body: RawBody = {**manifest, "metadata": metadata, "spec": spec, "status": {"phase": "Pending"}}

    @property
    def uid(self) -> str:
        """Generated uid; in a cluster, the API server assigns it."""
        return str(self.body["metadata"]["uid"])

    @property
    def has_ended(self) -> bool:
        """Whether the process of the pod has ended."""
        return self.body["status"]["phase"] in ("Succeeded", "Failed")

    async def start(self, process_spec: NodeProcessSpec) -> None:
        """Start the process in a new session, so that Ctrl-C in the terminal reaches only this command."""
        process_spec.termination_log.unlink(missing_ok=True)
        with process_spec.console_log.open("wb") as console:
            self._process = await asyncio.create_subprocess_exec(
                *process_spec.command,
                env=process_spec.environment,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=console,
                stderr=asyncio.subprocess.STDOUT,
                start_new_session=True,
                pass_fds=(process_spec.inherited_lock,),
            )
        self._watchdog.watch(self._process.pid)
        self._set_status({"phase": "Running", "podIP": LOOPBACK}, {"running": {"startedAt": self._started_at}})
        self._end_task = asyncio.create_task(self._report_termination(process_spec))

    def stop(self, *, grace_seconds: int) -> None:
        """Send SIGTERM now and SIGKILL after the grace period. A second call can only shorten the grace period."""
        if self.has_ended or self._process is None:
            self._report_deletion()
            return
        deadline = datetime.now(UTC) + timedelta(seconds=grace_seconds)
        current_deadline = self.body["metadata"].get("deletionTimestamp")
        if current_deadline and datetime.fromisoformat(current_deadline) <= deadline:
            return
        self._replace_body(
            {**self.body, "metadata": {**self.body["metadata"], "deletionTimestamp": _format_time(deadline)}}
        )
        self._send_signal(signal.SIGTERM)
        if self._stop_timer is not None:
            self._stop_timer.cancel()
        self._stop_timer = asyncio.get_running_loop().call_later(grace_seconds, self.kill)

    def kill(self) -> None:
        """Send SIGKILL to the process group."""
        self._send_signal(signal.SIGKILL)

    async def wait(self) -> None:
        """Wait until the process has ended."""
        if self._end_task is not None:
            await self._end_task

    async def _report_termination(self, process_spec: NodeProcessSpec) -> None:
        assert self._process is not None
        code = await self._process.wait()
        self._watchdog.unwatch(self._process.pid)
        self._send_signal(signal.SIGKILL)  # kill the remaining processes of the group
        if self._stop_timer is not None:
            self._stop_timer.cancel()
        exit_code = code if code >= 0 else 128 - code
        terminated = {
            "exitCode": exit_code,
            "reason": "Error" if exit_code else "Completed",
            "startedAt": self._started_at,
            "finishedAt": _format_time(datetime.now(UTC)),
            "message": _read_termination_message(process_spec, has_failed=exit_code != 0),
        }
        self._set_status(
            {"phase": "Failed" if exit_code else "Succeeded", "podIP": LOOPBACK}, {"terminated": terminated}
        )
        if self.body["metadata"].get("deletionTimestamp"):
            self._report_deletion()

    def _send_signal(self, signal_number: signal.Signals) -> None:
        """Send a signal to the supervisor, as the kubelet does; SIGKILL is sent to its whole process group."""
        assert self._process is not None
        try:
            if signal_number is signal.SIGKILL:
                os.killpg(self._process.pid, signal_number)
            elif self._process.returncode is None:
                self._process.send_signal(signal_number)
        except (ProcessLookupError, PermissionError):  # macOS returns EPERM for a process group of zombies
            return

    def _set_status(self, status: RawBody, container_state: RawBody) -> None:
        container = {
            "name": names.CONTAINER,
            "ready": "running" in container_state,
            "restartCount": 0,
            "state": container_state,
        }
        self._replace_body({**self.body, "status": {**status, "containerStatuses": [container]}})

    def _replace_body(self, new_body: RawBody) -> None:
        old_body, self.body = self.body, new_body
        self._on_change(old_body, new_body)

    def _report_deletion(self) -> None:
        self._on_change(self.body, None)


def _read_termination_message(process_spec: NodeProcessSpec, *, has_failed: bool) -> str:
    """Return the termination message, or the tail of the log if the process failed without a message."""
    message = _read_tail(process_spec.termination_log, MAX_TERMINATION_BYTES)
    return message or (_read_tail(process_spec.console_log, LOG_TAIL_BYTES) if has_failed else "")


def _read_tail(path: Path, max_bytes: int) -> str:
    try:
        return path.read_bytes()[-max_bytes:].decode("utf-8", "replace")
    except OSError:
        return ""


def _format_time(time: datetime) -> str:
    return time.isoformat().replace("+00:00", "Z")
