"""Run supervisors as local processes, each with the environment and folders of a pod."""

import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from finetune_api.termination import Termination, parse_termination
from testing.processes.forks.fork_server import use_forks

REPOSITORY = Path(__file__).parents[2]
_TIMEOUT_SECONDS = 300.0


def find_free_port() -> int:
    """Return a free port below those that the system assigns, so that no other process gets it by chance."""
    while True:
        port = 20_000 + secrets.randbelow(10_000)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:  # another process uses it
                continue
            return port


@dataclass(frozen=True)
class SupervisorPod:
    """A local supervisor process that replaces a pod, with its folder and status port."""

    process: subprocess.Popen[bytes]
    folder: Path
    status_port: int

    @property
    def log(self) -> str:
        return (self.folder / "stdout").read_text(errors="replace")

    @property
    def termination(self) -> Termination | None:
        return parse_termination((self.folder / "termination-log").read_text())

    def heartbeats(self) -> dict[int, dict[str, Any]]:
        """Return the latest heartbeats by local rank."""
        heartbeats = {}
        for path in (self.folder / "run" / "ranks").glob("rank-*.json"):
            heartbeats[int(path.stem.removeprefix("rank-"))] = json.loads(path.read_text())
        return heartbeats

    def get(self, path: str) -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.status_port}{path}", timeout=5) as response:
            return str(response.read().decode())

    def wait(self) -> int:
        try:
            return self.process.wait(_TIMEOUT_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise AssertionError(f"did not end within {_TIMEOUT_SECONDS:.0f}s:\n{self.log}") from None

    def wait_for_step(self, step: int) -> None:
        """Wait until local rank 0 has completed the optimizer step."""
        deadline = time.monotonic() + _TIMEOUT_SECONDS
        while time.monotonic() < deadline:
            assert self.process.poll() is None, f"ended before step {step}:\n{self.log}"
            heartbeat = self.heartbeats().get(0)
            if heartbeat and heartbeat["progress"]["step"] >= step:
                return
            time.sleep(0.02)
        raise AssertionError(f"step {step} not reached within {_TIMEOUT_SECONDS:.0f}s:\n{self.log}")


@dataclass(frozen=True)
class SupervisorJob:
    """A job whose pods are local processes; every attempt has separate folders below `folder`.

    starts_interpreters: whether a launcher of the trainer is a new interpreter, as in a pod, instead of a fork.
    """

    folder: Path
    spec: dict[str, Any]
    nodes: int = 1
    ranks_per_node: int = 2
    uid: str = "uid-1"
    name: str = "tiny"
    grace_seconds: int = 60
    output: Path | None = None
    program: tuple[str, ...] = (sys.executable, "-m", "finetune_supervisor")
    env: dict[str, str] = field(default_factory=dict)
    starts_interpreters: bool = False

    @property
    def output_folder(self) -> Path:
        return self.output or self.folder / "output"

    def start(self, *, attempt: int = 0) -> list[SupervisorPod]:
        port = find_free_port()
        return [self._start_pod(attempt, node_rank, port) for node_rank in range(self.nodes)]

    def run(self, *, attempt: int = 0) -> list[SupervisorPod]:
        """Start all pods of an attempt and wait until they have ended."""
        pods = self.start(attempt=attempt)
        for pod in pods:
            pod.wait()
        return pods

    def _start_pod(self, attempt: int, node_rank: int, port: int) -> SupervisorPod:
        folder = self.folder / f"attempt-{attempt}-node-{node_rank}"
        (folder / "run").mkdir(parents=True)
        config = folder / "config.json"
        config.write_text(json.dumps(self.spec))
        status_port = find_free_port()
        environment = {
            "PATH": os.environ["PATH"],
            "HOME": str(folder),
            "PYTHONPATH": os.pathsep.join(str(REPOSITORY / part) for part in ("operator", "trainer")),
            "OMP_NUM_THREADS": "1",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "NNODES": str(self.nodes),
            "NODE_RANK": str(node_rank),
            "NPROC_PER_NODE": str(self.ranks_per_node),
            "FINETUNE_NAMESPACE": "default",
            "FINETUNE_JOB": self.name,
            "FINETUNE_JOB_UID": self.uid,
            "FINETUNE_ATTEMPT": str(attempt),
            "FINETUNE_WORLD_SIZE": str(self.nodes * self.ranks_per_node),
            "FINETUNE_CONFIG": str(config),
            "FINETUNE_OUTPUT": str(self.output_folder),
            "FINETUNE_CACHE_DIR": str(self.folder / "cache"),
            "FINETUNE_RUN_DIR": str(folder / "run"),
            "FINETUNE_TERMINATION_LOG": str(folder / "termination-log"),
            "FINETUNE_STATUS_PORT": str(status_port),
            "FINETUNE_GRACE_SECONDS": str(self.grace_seconds),
            **self.env,
        }
        with (folder / "stdout").open("wb") as stdout:
            process = subprocess.Popen(
                self.program,
                env=environment if self.starts_interpreters else use_forks(environment),
                stdout=stdout,
                stderr=subprocess.STDOUT,
            )
        return SupervisorPod(process, folder, status_port)


def stop(pod: SupervisorPod) -> None:
    """Send SIGTERM, as the kubelet does."""
    pod.process.send_signal(signal.SIGTERM)
