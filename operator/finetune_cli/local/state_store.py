"""What is known of a job between two runs of the command: status.json in a folder beside the job's output."""

import fcntl
import json
import os
import shutil
import uuid
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from finetune_api.schema.cel_rules import MUTABLE, MUTABLE_WHILE_SUSPENDED
from finetune_api.v1alpha1.job import FineTuneJob, FineTuneJobSpec
from finetune_api.v1alpha1.status import AttemptState, JobStatus, RestartCounts
from finetune_cli.errors import BadInput
from finetune_cli.job_file import JobFile
from finetune_operator.controller.reconcile import render_status

Raw = dict[str, Any]

MAY_CHANGE = frozenset((*MUTABLE, *MUTABLE_WHILE_SUSPENDED))  # between two runs nothing runs, as while suspended


class Record:
    """The job as an API server would have it. While it is open, no other command can open it."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.lock = _lock(folder / "lock")  # the nodes inherit it: until they have ended, nobody starts others
        self._body: Raw = {}

    @property
    def file(self) -> Path:
        return self.folder / "status.json"

    def begin(self, file: JobFile, *, fresh: bool) -> Raw:
        """The job to run: the one that was begun here, or a new one if it is another, or was changed."""
        before = None if fresh else self._read()
        metadata = file.body["metadata"]
        if before is None or _changed_fields(before, file):
            for left in self.folder.glob("attempt-*"):
                shutil.rmtree(left)
            created = datetime.now(UTC).isoformat()
            new = {"uid": str(uuid.uuid4()), "creationTimestamp": created, "generation": 1}
            self._body = {**file.body, "metadata": {**metadata, **new}, "status": {}}
        else:
            kept = {key: before["metadata"][key] for key in ("uid", "creationTimestamp", "generation")}
            status = continued(JobStatus.model_validate(before.get("status") or {}), now=datetime.now(UTC))
            self._body = {**file.body, "metadata": {**metadata, **kept}, "status": render_status(status)}
        self._write()
        return self._body

    def changes(self, file: JobFile) -> tuple[str, ...]:
        """Fields that make this another job than the one that was begun here."""
        before = self._read()
        return _changed_fields(before, file) if before else ()

    def write_status(self, status: Raw) -> None:
        """Keep it, whole or not at all."""
        self._body = {**self._body, "status": status}
        self._write()

    def close(self) -> None:
        """Let others in, once the nodes have ended too."""
        os.close(self.lock)

    def _read(self) -> Raw | None:
        try:
            body: Raw = json.loads(self.file.read_text(encoding="utf-8"))
            FineTuneJob.parse(body)
            return body
        except FileNotFoundError:
            return None
        except (ValueError, ValidationError) as error:
            raise BadInput(f"{self.file}: cannot be read ({error}); start anew with --fresh") from error

    def _write(self) -> None:
        beside = self.file.with_suffix(".tmp")
        try:
            beside.write_text(json.dumps(self._body, indent=1, default=str) + "\n", encoding="utf-8")
            beside.replace(self.file)
        except OSError as error:
            raise BadInput(
                f"{self.file}: cannot be written ({error.strerror}); make room there, or give another --output"
            ) from error


def continued(status: JobStatus, *, now: datetime) -> JobStatus:
    """Whatever the last run left unfinished counts as suspended: no process of it is left. Complete stays complete."""
    if not status.attempts or status.attempts[-1].state is AttemptState.SUCCEEDED:
        return status
    failed = status.completion_time is not None
    record = status.attempts[-1].model_copy(update={"state": AttemptState.STOPPED})
    update = {
        "attempts": (*status.attempts[:-1], record),
        "completion_time": None,
        "without_progress": RestartCounts() if failed else status.without_progress,
        "start_time": now if failed else status.start_time,
    }
    return status.model_copy(update=update)


def _changed_fields(before: Raw, file: JobFile) -> tuple[str, ...]:
    old, new = FineTuneJob.parse(before), file.job
    names = ("name", "namespace")
    identity = [f"metadata.{name}" for name in names if getattr(old.metadata, name) != getattr(new.metadata, name)]
    fields = ((field.alias or name, name) for name, field in FineTuneJobSpec.model_fields.items())
    changed = [
        f"spec.{alias}"
        for alias, name in fields
        if alias not in MAY_CHANGE and getattr(old.spec, name) != getattr(new.spec, name)
    ]
    return (*identity, *changed)


def _lock(path: Path) -> int:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        holder = os.read(descriptor, 20).decode(errors="replace").strip()
        os.close(descriptor)
        raise BadInput(
            f"{path.parent}: in use by process {holder} (finetune run), or by its nodes, which may still be saving"
        ) from error
    os.truncate(descriptor, 0)
    os.write(descriptor, f"{os.getpid()}\n".encode())
    return descriptor
