"""State of a local job between two runs of the command: status.json in a folder next to the job's output."""

import fcntl
import json
import os
import shutil
import uuid
from datetime import UTC, datetime
from pathlib import Path

from pydantic import ValidationError

from finetune_api.v1alpha1.job import FineTuneJob
from finetune_api.v1alpha1.status import JobStatus
from finetune_cli.errors import BadInput
from finetune_cli.job_file import JobFile
from finetune_cli.local.resume import changed_fields, prepare_resume
from finetune_operator.controller.reconcile import render_status
from finetune_operator.observation.ownership import RawBody


class StateStore:
    """Stores the job as the API server would. A lock prevents a second command from opening the same folder."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        # The nodes inherit the lock, so that no other command starts nodes before they have ended.
        self.lock = _lock(folder / "lock")
        self._body: RawBody = {}

    @property
    def file(self) -> Path:
        """The path of the status file."""
        return self.folder / "status.json"

    def open_job(self, file: JobFile, *, fresh: bool) -> RawBody:
        """Return the stored job if it is the same as that of the file, and otherwise a new one."""
        stored = None if fresh else self._read()
        metadata = file.body["metadata"]
        if stored is None or changed_fields(stored, file):
            for attempt_folder in self.folder.glob("attempt-*"):
                shutil.rmtree(attempt_folder)
            created = datetime.now(UTC).isoformat()
            server_fields = {"uid": str(uuid.uuid4()), "creationTimestamp": created, "generation": 1}
            status: RawBody = {}
        else:
            server_fields = {key: stored["metadata"][key] for key in ("uid", "creationTimestamp", "generation")}
            old_status = JobStatus.model_validate(stored.get("status") or {})
            status = render_status(prepare_resume(old_status, now=datetime.now(UTC)))
        self._body = {**file.body, "metadata": {**metadata, **server_fields}, "status": status}
        self._write()
        return self._body

    def changed_fields(self, file: JobFile) -> tuple[str, ...]:
        """Return the fields that make the job of the file a different one from the stored job."""
        stored = self._read()
        return changed_fields(stored, file) if stored else ()

    def write_status(self, status: RawBody) -> None:
        """Write the status to the file atomically."""
        self._body = {**self._body, "status": status}
        self._write()

    def close(self) -> None:
        """Release the lock; it is free once the nodes have ended, too."""
        os.close(self.lock)

    def _read(self) -> RawBody | None:
        try:
            body: RawBody = json.loads(self.file.read_text(encoding="utf-8"))
            FineTuneJob.parse(body)
            return body
        except FileNotFoundError:
            return None
        except (ValueError, ValidationError) as error:
            raise BadInput(f"{self.file}: cannot be read ({error}); start over with --fresh") from error

    def _write(self) -> None:
        temporary = self.file.with_suffix(".tmp")
        try:
            temporary.write_text(json.dumps(self._body, indent=1, default=str) + "\n", encoding="utf-8")
            temporary.replace(self.file)
        except OSError as error:
            raise BadInput(
                f"{self.file}: cannot be written ({error.strerror}); free some space there, or choose another --output"
            ) from error


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
