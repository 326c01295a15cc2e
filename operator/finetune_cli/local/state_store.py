"""Stores the state of a local job between runs in status.json, in a folder next to the job's output."""

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
from finetune_cli.local.resume import find_changed_fields, prepare_resume
from finetune_operator.controller.reconcile import render_status
from finetune_operator.observation.ownership import RawBody


class StateStore:
    """Stores a job in place of the API server. A lock prevents a second command from using the same folder."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        # Nodes inherit the lock, so that no other command can start nodes while these nodes are running.
        self.lock = _acquire_lock(folder / "lock")
        self._body: RawBody = {}

    @property
    def status_path(self) -> Path:
        """Path of the status file."""
        return self.folder / "status.json"

    def open_job(self, job_file: JobFile, *, start_over: bool) -> RawBody:
        """Return the stored job if it matches the job file, otherwise a new job."""
        stored_body = None if start_over else self._read()
        metadata = job_file.body["metadata"]
        if stored_body is None or find_changed_fields(stored_body, job_file):
            for attempt_folder in self.folder.glob("attempt-*"):
                shutil.rmtree(attempt_folder)
            created = datetime.now(UTC).isoformat()
            server_fields = {"uid": str(uuid.uuid4()), "creationTimestamp": created, "generation": 1}
            status: RawBody = {}
        else:
            server_fields = {key: stored_body["metadata"][key] for key in ("uid", "creationTimestamp", "generation")}
            old_status = JobStatus.model_validate(stored_body.get("status") or {})
            status = render_status(prepare_resume(old_status, now=datetime.now(UTC)))
        self._body = {**job_file.body, "metadata": {**metadata, **server_fields}, "status": status}
        self._write()
        return self._body

    def find_changed_fields(self, job_file: JobFile) -> tuple[str, ...]:
        """Return the changed fields of the job file that prevent the stored job from being resumed."""
        stored_body = self._read()
        return find_changed_fields(stored_body, job_file) if stored_body else ()

    def write_status(self, status: RawBody) -> None:
        """Write the status to the file atomically."""
        self._body = {**self._body, "status": status}
        self._write()

    def close(self) -> None:
        """Release the lock of this process; running nodes hold it until they end."""
        os.close(self.lock)

    def _read(self) -> RawBody | None:
        try:
            body: RawBody = json.loads(self.status_path.read_text(encoding="utf-8"))
            FineTuneJob.parse(body)
            return body
        except FileNotFoundError:
            return None
        except (ValueError, ValidationError) as error:
            advice = "move it to another folder; the same command then continues from the checkpoints"
            raise BadInput(f"{self.status_path}: cannot be read ({error}); {advice}") from error

    def _write(self) -> None:
        temporary = self.status_path.with_suffix(".tmp")
        try:
            temporary.write_text(json.dumps(self._body, indent=1, default=str) + "\n", encoding="utf-8")
            temporary.replace(self.status_path)
        except OSError as error:
            raise BadInput(
                f"{self.status_path}: cannot be written ({error.strerror}); free some space there,"
                " or choose another --output"
            ) from error


def _acquire_lock(path: Path) -> int:
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
