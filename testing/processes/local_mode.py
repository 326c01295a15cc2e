"""`finetune run` as its users start it, and what it leaves behind."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from finetune_api.v1alpha1.status import JobStatus
from testing.models.tiny_text import Tiny

Raw = dict[str, Any]

PATIENCE_SECONDS = 240  # importing torch on a busy machine takes long


@dataclass(frozen=True)
class LocalJob:
    """A job file, and the folders that stand in for its volumes."""

    folder: Path
    volumes: Mapping[str, Path]
    name: str = "first"

    @property
    def output(self) -> Path:
        return self.folder / "output/default" / self.name

    @property
    def beside(self) -> Path:
        return self.output.with_name(f"{self.name}.local")

    @property
    def file(self) -> Path:
        return self.folder / f"{self.name}.yaml"

    @property
    def status(self) -> JobStatus:
        return JobStatus.model_validate(json.loads((self.beside / "status.json").read_text())["status"])

    def start(self, *more: str) -> subprocess.Popen[str]:
        """In a session of its own, so that a signal to its group is what a terminal's Ctrl-C is."""
        volumes = (word for name, path in self.volumes.items() for word in ("--volume", f"{name}={path}"))
        command = [sys.executable, "-m", "finetune_cli", "run", self.file.name, *volumes, *more]
        paths = os.pathsep.join(str(Path(path).resolve()) for path in sys.path if path)
        return subprocess.Popen(
            command,
            cwd=self.folder,
            env={**os.environ, "PYTHONPATH": paths},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def run(self, *more: str) -> tuple[int, str]:
        """Exit code and output."""
        return finish(self.start(*more))

    def heartbeat(self, *, node_rank: int, attempt: int = 0) -> Raw | None:
        """The last sign of life of a node's only rank."""
        path = self.beside / f"attempt-{attempt}/node-{node_rank}/run/ranks/rank-0.json"
        try:
            beat: Raw = json.loads(path.read_text())
        except FileNotFoundError:
            return None
        return beat

    def wait_for_step(self, step: int, *, node_rank: int) -> int:
        """The pid of the node's rank once it has done `step` steps."""

        def reached() -> int | None:
            beat = self.heartbeat(node_rank=node_rank)
            return int(beat["pid"]) if beat and beat["progress"]["step"] >= step else None

        return wait_until(reached, f"step {step} on node {node_rank}")


def write_job(folder: Path, tiny: Tiny, **fields: Any) -> LocalJob:
    """Two nodes of one process; `fields` (camelCase) are laid over the spec."""
    spec = {
        "model": {"name": "/data/model"},
        "dataset": {"train": [{"name": "/data/train.jsonl"}], "maxLength": 256},
        "sft": {},
        "lora": {},
        "training": {"maxSteps": 6, "saveSteps": 3, "learningRate": 1e-3, "globalBatchSize": 4},
        "numNodes": 2,
        "volumes": [{"name": "data", "mountPath": "/data", "persistentVolumeClaim": {"claimName": "datasets"}}],
        "output": {"persistentVolumeClaim": {"claimName": "models"}},
        **fields,
    }
    return write_body(folder, job_body(spec), {"data": tiny.train.parent})


def write_command(folder: Path, command: Raw, *, data: Path | None = None, **fields: Any) -> LocalJob:
    """Two nodes of two processes that run a program of the user's own; None removes a field."""
    mounted = {"name": "data", "mountPath": "/data", "persistentVolumeClaim": {"claimName": "datasets"}}
    spec = {
        "command": command,
        "image": "registry.example/minimind:1",
        "numNodes": 2,
        "nprocPerNode": 2,
        "volumes": [mounted] if data else [],
        "output": {"persistentVolumeClaim": {"claimName": "models"}},
        **fields,
    }
    spec = {name: value for name, value in spec.items() if value is not None}
    return write_body(folder, job_body(spec), {"data": data} if data else {})


def job_body(spec: Raw) -> Raw:
    return {"apiVersion": "finetune.dev/v1alpha1", "kind": "FineTuneJob", "metadata": {"name": "first"}, "spec": spec}


def write_body(folder: Path, body: Raw, volumes: Mapping[str, Path]) -> LocalJob:
    """A job file, named after the job, and what its volumes are here."""
    job = LocalJob(folder, volumes, body["metadata"]["name"])
    folder.mkdir(parents=True, exist_ok=True)
    job.file.write_text(yaml.safe_dump(body))
    return job


def finish(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Exit code and output of a run; one that hangs is stopped and fails the test."""
    try:
        output, _ = process.communicate(timeout=PATIENCE_SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        raise AssertionError(f"no end within {PATIENCE_SECONDS} s:\n{output}") from None
    return process.returncode, output


def wait_until(look: Callable[[], int | None], what: str) -> int:
    """What `look` finds."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while (found := look()) is None:
        if time.monotonic() > deadline:
            raise AssertionError(f"waited {PATIENCE_SECONDS} s for {what}")
        time.sleep(0.05)
    return found


def wait_until_nothing_runs(folder: Path) -> None:
    """Helpers of Python's multiprocessing end a moment after the rank they served."""
    wait_until(lambda: None if processes_of(folder) else 0, f"the end of {processes_of(folder)}")


def processes_of(folder: Path) -> list[int]:
    """Processes of this machine whose environment names a folder, which all of a job's do (Linux only)."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/environ"):
        try:
            if str(folder).encode() in entry.read_bytes():
                found.append(int(entry.parent.name))
        except OSError:
            continue
    return found
