"""Start jobs with `finetune run`, and access their files and processes."""

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
from testing.models.tiny_text import TinyFiles
from testing.processes.forks.fork_server import use_forks

RawBody = dict[str, Any]

TIMEOUT_SECONDS = 480  # importing torch on a busy host is slow


@dataclass(frozen=True)
class LocalJob:
    """A job file and the host folders that replace its volumes."""

    folder: Path
    volumes: Mapping[str, Path]
    name: str = "first"

    @property
    def output(self) -> Path:
        return self.folder / "output/default" / self.name

    @property
    def local_folder(self) -> Path:
        return self.output.with_name(f"{self.name}.local")

    @property
    def job_file(self) -> Path:
        return self.folder / f"{self.name}.yaml"

    @property
    def status(self) -> JobStatus:
        return JobStatus.model_validate(json.loads((self.local_folder / "status.json").read_text())["status"])

    def start(self, *options: str) -> subprocess.Popen[str]:
        """Start the job in a new session, so that a signal to its process group works like Ctrl-C in a terminal."""
        volumes = (word for name, path in self.volumes.items() for word in ("--volume", f"{name}={path}"))
        command = [sys.executable, "-P", "-m", "finetune_cli", "run", self.job_file.name, *volumes, *options]
        paths = os.pathsep.join(str(Path(path).resolve()) for path in sys.path if path)
        return subprocess.Popen(
            command,
            cwd=self.folder,
            env=use_forks({**os.environ, "PYTHONPATH": paths}),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def run(self, *options: str) -> tuple[int, str]:
        """Run the job to completion and return its exit code and output."""
        return wait_for_exit(self.start(*options))

    def read_heartbeat(self, *, node_rank: int, attempt: int = 0) -> RawBody | None:
        """Return the latest heartbeat of a node's only rank, or None before the first heartbeat."""
        path = self.local_folder / f"attempt-{attempt}/node-{node_rank}/run/ranks/rank-0.json"
        try:
            heartbeat: RawBody = json.loads(path.read_text())
        except FileNotFoundError:
            return None
        return heartbeat

    def wait_for_step(self, step: int, *, node_rank: int, attempt: int = 0) -> int:
        """Wait until the node's only rank has completed `step` steps and return its pid."""

        def find_pid() -> int | None:
            heartbeat = self.read_heartbeat(node_rank=node_rank, attempt=attempt)
            return int(heartbeat["pid"]) if heartbeat and heartbeat["progress"]["step"] >= step else None

        return wait_until(find_pid, f"step {step} on node {node_rank}")


def write_job(folder: Path, tiny_files: TinyFiles, **fields: Any) -> LocalJob:
    """Write a job with two nodes of one rank each; `fields` (in camelCase) override fields of the spec."""
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
    return write_job_file(folder, build_job_body(spec), {"data": tiny_files.train.parent})


def write_command_job(folder: Path, command: RawBody, *, data: Path | None = None, **fields: Any) -> LocalJob:
    """Write a command-mode job with two nodes of two ranks each; fields that are None are removed from the spec."""
    data_volume = {"name": "data", "mountPath": "/data", "persistentVolumeClaim": {"claimName": "datasets"}}
    spec = {
        "command": command,
        "image": "registry.example/minimind:1",
        "numNodes": 2,
        "nprocPerNode": 2,
        "volumes": [data_volume] if data else [],
        "output": {"persistentVolumeClaim": {"claimName": "models"}},
        **fields,
    }
    spec = {name: value for name, value in spec.items() if value is not None}
    return write_job_file(folder, build_job_body(spec), {"data": data} if data else {})


def build_job_body(spec: RawBody) -> RawBody:
    return {"apiVersion": "finetune.dev/v1alpha1", "kind": "FineTuneJob", "metadata": {"name": "first"}, "spec": spec}


def write_job_file(folder: Path, body: RawBody, volumes: Mapping[str, Path]) -> LocalJob:
    """Write a job file named after the job; `volumes` maps volume names to host folders."""
    job = LocalJob(folder, volumes, body["metadata"]["name"])
    folder.mkdir(parents=True, exist_ok=True)
    job.job_file.write_text(yaml.safe_dump(body))
    return job


def wait_for_exit(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Wait until a run has ended and return its exit code and output; on timeout, kill it and fail the test."""
    try:
        output, _ = process.communicate(timeout=TIMEOUT_SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        raise AssertionError(f"did not end within {TIMEOUT_SECONDS} s:\n{output}") from None
    return process.returncode, output


def wait_until(probe: Callable[[], int | None], description: str) -> int:
    """Poll `probe` until it returns a number, and return the number."""
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while (result := probe()) is None:
        if time.monotonic() > deadline:
            raise AssertionError(f"waited {TIMEOUT_SECONDS} s for {description}")
        time.sleep(0.05)
    return result


def wait_for_processes_to_end(folder: Path) -> None:
    """Wait until no process of the job is running; multiprocessing helpers may exit shortly after their rank."""
    wait_until(lambda: None if list_pids_with_folder(folder) else 0, f"the end of {list_pids_with_folder(folder)}")


def list_pids_with_folder(folder: Path) -> list[int]:
    """Return the pids of a job's processes (Linux only).

    They have the folder in the variables with which they were started, or as their working directory.
    """
    pids = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if str(folder).encode() in (entry / "environ").read_bytes() or (entry / "cwd").readlink() == folder:
                pids.append(int(entry.name))
        except OSError:
            continue
    return pids
