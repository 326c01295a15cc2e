"""The output folder of a job: whose it is, which attempt may publish there, and the marker of success."""

import json
import secrets
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from finetune_supervisor.success_marker import is_finished, success_file
from finetune_trainer.atomic_files import explained, remove, sync_tree, write_json
from finetune_trainer.errors import OutputError

_SHARED_WITHIN_SECONDS = 30.0  # how long a network file system may hide a new file from another node


@dataclass(frozen=True)
class Identity:
    """The job and attempt that runs, and what it trains."""

    uid: str
    namespace: str
    name: str
    attempt: int
    fingerprint: str


@dataclass(frozen=True)
class Output:
    """One job's folder. Only the attempt that job.json names as its holder may publish."""

    root: Path
    identity: Identity

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    @property
    def result(self) -> Path:
        return self.root / "result"

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    @property
    def job_file(self) -> Path:
        return self.root / "job.json"

    @property
    def success_file(self) -> Path:
        return success_file(self.root)

    @property
    def staging_prefix(self) -> str:
        """Of whatever this attempt has not published yet; a newer attempt removes it when it takes over."""
        return f".tmp-attempt-{self.identity.attempt}-"

    def is_finished(self) -> bool:
        """This job has published its result."""
        return is_finished(self.root, uid=self.identity.uid)

    def check_owner(self, *, overwrite: bool) -> None:
        """Reads only, so every rank may ask before anything is built. Raises OutputError."""
        holder = _read_object(self.job_file)
        if holder is not None and holder.get("uid") == self.identity.uid:
            attempt = holder.get("attempt")
            if isinstance(attempt, int) and attempt > self.identity.attempt:
                raise OutputError(f"{self.root} is superseded by attempt {attempt}; this is {self.identity.attempt}")
            if holder.get("fingerprint") == self.identity.fingerprint or overwrite:
                return
            raise OutputError(
                f"{self.root} holds checkpoints of this job with another model, dataset, method or training setting;"
                " give the changed job another output.subPath, or set output.overwrite to start over"
            )
        occupied = any(folder.is_dir() and any(folder.iterdir()) for folder in (self.checkpoints, self.result))
        if (occupied or holder is not None) and not overwrite:
            raise OutputError(
                f"{self.root} holds the output of {_owner(holder)}; choose another output.subPath,"
                " or set output.overwrite to replace it"
            )

    def claim(self, *, overwrite: bool) -> str:
        """Become the holder; gives the token that every node must be able to read. On rank 0 only."""
        self.check_owner(overwrite=overwrite)
        with explained(self.root):
            self.root.mkdir(parents=True, exist_ok=True)
            holder = _read_object(self.job_file)
            token = secrets.token_hex(8)
            if holder is None or not self._continues(holder):
                remove(self.checkpoints)
                remove(self.result)
            write_json(self.job_file, {**asdict(self.identity), "token": token})
            self.checkpoints.mkdir(exist_ok=True)
            self._remove_staged()  # after the claim: what an older attempt stages from now on, it will not publish
        return token

    def check_shared(self, token: str) -> None:
        """Raises OutputError if this node sees another folder than rank 0."""
        deadline = time.monotonic() + _SHARED_WITHIN_SECONDS
        while (found := _read_object(self.job_file)) is None or found.get("token") != token:
            if time.monotonic() > deadline:
                raise OutputError(
                    f"{self.root} on this node is not the folder that rank 0 writes; all nodes need the same storage,"
                    " so spec.output needs a ReadWriteMany claim"
                )
            time.sleep(0.2)

    def assert_holder(self) -> None:
        """Right before anything is published: a newer attempt may have taken over."""
        holder = _read_object(self.job_file)
        if holder is None or holder.get("uid") != self.identity.uid:
            raise OutputError(f"{self.root} was taken over by {_owner(holder)}; nothing more is written there")
        if holder.get("attempt") != self.identity.attempt:
            raise OutputError(f"{self.root}: superseded by attempt {holder.get('attempt')}; nothing more is written")

    def publish(self, folder: Path, write: Callable[[Path], None]) -> None:
        """Written beside, made durable, and renamed if this attempt still holds the output."""
        staged = self.checkpoints / f"{self.staging_prefix}{folder.name}"
        with explained(self.root):
            remove(staged)
            staged.mkdir(parents=True)
            write(staged)
            sync_tree(staged)
            replaced = staged.with_name(f"{self.staging_prefix}replaced-{folder.name}")
            self.assert_holder()
            if folder.exists():
                folder.rename(replaced)
            try:
                staged.rename(folder)
            except FileNotFoundError as error:  # the newer attempt has cleared it away
                self.assert_holder()
                raise OutputError(f"{staged} vanished before it could be published") from error
            remove(replaced)

    def mark_success(self) -> None:
        """The last thing that is written; without it the result does not count."""
        marker = {"uid": self.identity.uid, "fingerprint": self.identity.fingerprint, "attempt": self.identity.attempt}
        with explained(self.root):
            self.assert_holder()
            write_json(self.success_file, marker, beside=self.checkpoints / f"{self.staging_prefix}SUCCESS")

    def _continues(self, holder: dict[str, object]) -> bool:
        return holder.get("uid") == self.identity.uid and holder.get("fingerprint") == self.identity.fingerprint

    def _remove_staged(self) -> None:
        for entry in self.checkpoints.glob(".tmp-*"):
            if entry.is_dir():
                shutil.rmtree(entry, ignore_errors=True)  # its writer may still be adding files
            else:
                entry.unlink(missing_ok=True)


def _read_object(path: Path) -> dict[str, object] | None:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError, json.JSONDecodeError):
        return None
    return value if isinstance(value, dict) else None


def _owner(holder: dict[str, object] | None) -> str:
    if holder is None:
        return "an unknown owner"
    return f"job {holder.get('namespace')}/{holder.get('name')} (uid {holder.get('uid')})"
