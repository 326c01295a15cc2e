"""Operator processes of a soak test: two replicas with leader election, restarted when they exit."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.rig import NAMESPACE, count_requests, read_cpu_seconds, read_memory_mib
from testing.upgrade.releases import Release

FIRST_PORT = 28090
PORTS = 8
SAMPLE_INTERVAL_SECONDS = 2.0
METRICS_TIMEOUT_SECONDS = 1.5
READY_TIMEOUT_SECONDS = 90.0
EXIT_TIMEOUT_SECONDS = 40.0  # the operator drains its passes for 10 s and stops kopf within 10 s
RESTART_DELAY_SECONDS = 1.0
# A leader that was paused for longer than the renew deadline exits, after at most the time until its next check.
PAUSE_THAT_ENDS_A_LEADER_SECONDS = 8.0
EXIT_AFTER_PAUSE_SECONDS = 20.0
LAG_WINDOW_SECONDS = 180.0  # the metric contains the longest of the last 120 delays, a minute on an idle host
LOG_TAIL_LINES = 5


@dataclass(frozen=True)
class MemorySample:
    """Memory of a process at a time; both times in seconds."""

    since_start_of_test: float
    age: float
    memory_mib: float


@dataclass
class Replica:
    """One operator process and what was measured of it."""

    release: Release
    port: int
    process: subprocess.Popen[bytes]
    log: Path
    started_at: float
    is_leader: bool = False
    is_ready: bool = False
    paused_at: float | None = None
    resumed_at: float = float("-inf")
    pause_seconds: float = 0.0  # of the last pause
    led_when_paused: bool = False
    samples: list[MemorySample] = field(default_factory=list)
    requests: Counter[str] = field(default_factory=Counter)
    loop_lags: list[float] = field(default_factory=list)  # in seconds, apart from pauses
    cpu_seconds: float = 0.0

    @property
    def may_exit(self) -> bool:
        """Whether a pause explains that this process exits."""
        recently = time.monotonic() - self.resumed_at < EXIT_AFTER_PAUSE_SECONDS
        return recently and self.led_when_paused and self.pause_seconds >= PAUSE_THAT_ENDS_A_LEADER_SECONDS

    def pause(self) -> None:
        self.paused_at, self.led_when_paused = time.monotonic(), self.is_leader
        self.process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        assert self.paused_at is not None
        self.process.send_signal(signal.SIGCONT)
        self.resumed_at = time.monotonic()
        self.pause_seconds = self.resumed_at - self.paused_at
        self.paused_at = None

    def read_log_tail(self) -> str:
        return " | ".join(self.log.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:])[-1500:]


class ReplicaPair:
    """Starts, samples and restarts the replicas; `problems` contains exits that no disturbance explains."""

    def __init__(self, kubeconfig: Path, log_folder: Path) -> None:
        self.replicas: list[Replica] = []
        self.ended: list[Replica] = []
        self.problems: list[str] = []
        self.exits_after_pause = 0
        self._kubeconfig = kubeconfig
        self._log_folder = log_folder
        self._started_at = time.monotonic()

    @property
    def all_replicas(self) -> list[Replica]:
        """All processes of the test, including those that have ended."""
        return [*self.ended, *self.replicas]

    def find_leader(self) -> Replica | None:
        """Return the replica that reports to lead, as of the last sample."""
        return next((replica for replica in self.replicas if replica.is_leader), None)

    def start(self, release: Release) -> Replica:
        """Start a replica on a free port."""
        port = next(p for p in range(FIRST_PORT, FIRST_PORT + PORTS) if p not in {r.port for r in self.replicas})
        log = self._log_folder / f"operator-{len(self.all_replicas):03}-{release.name}.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                self._build_command(release, port), stdout=output, stderr=output, env=_build_environment(release)
            )
        replica = Replica(release, port, process, log, started_at=time.monotonic())
        self.replicas.append(replica)
        return replica

    def kill(self, replica: Replica) -> None:
        """Kill the process and start another one of the same release, as a kubelet does."""
        replica.process.send_signal(signal.SIGKILL)
        self._remove(replica)
        self.start(replica.release)

    async def stop(self, replica: Replica) -> None:
        """Stop the process gracefully."""
        with suppress(TimeoutError):
            await self._sample(replica)
        replica.process.terminate()
        self.replicas.remove(replica)
        self.ended.append(replica)
        try:
            code = await asyncio.to_thread(replica.process.wait, EXIT_TIMEOUT_SECONDS)
        except subprocess.TimeoutExpired:
            self.problems.append(f"{replica.log.name} does not exit within {EXIT_TIMEOUT_SECONDS:.0f} s after SIGTERM")
            replica.process.kill()
            return
        if code:
            self.problems.append(f"{replica.log.name} exits with {code} after SIGTERM: {replica.read_log_tail()}")

    async def wait_until_ready(self, *replicas: Replica) -> None:
        """Wait until the replicas, or by default all, are ready and one replica leads; record a problem otherwise."""
        deadline = time.monotonic() + READY_TIMEOUT_SECONDS
        while time.monotonic() < deadline:
            await asyncio.gather(*(self._sample(replica) for replica in list(self.replicas)))
            if all(replica.is_ready for replica in replicas or self.replicas) and self.find_leader():
                return
            await asyncio.sleep(0.5)
        states = [(r.log.name, "ready" if r.is_ready else "not ready", r.is_leader) for r in self.replicas]
        self.problems.append(f"no ready pair with a leader within {READY_TIMEOUT_SECONDS:.0f} s: {states}")

    async def run(self) -> None:
        """Sample the replicas and restart those that have exited, until cancelled."""
        while True:
            for replica in list(self.replicas):
                await self._sample(replica)
                if replica in self.replicas and replica.process.poll() is not None:
                    await self._restart_exited(replica)
            await asyncio.sleep(SAMPLE_INTERVAL_SECONDS)

    def kill_all(self) -> None:
        for replica in self.replicas:
            replica.process.kill()
            replica.process.wait()

    async def _restart_exited(self, replica: Replica) -> None:
        if replica.may_exit:
            self.exits_after_pause += 1
        else:
            code = replica.process.returncode
            self.problems.append(f"{replica.log.name} exits with {code}: {replica.read_log_tail()}")
        self._remove(replica)
        await asyncio.sleep(RESTART_DELAY_SECONDS)
        self.start(replica.release)

    def _remove(self, replica: Replica) -> None:
        replica.process.wait()
        replica.is_leader = replica.is_ready = False
        self.replicas.remove(replica)
        self.ended.append(replica)

    async def _sample(self, replica: Replica) -> None:
        if replica.paused_at is not None or replica.process.poll() is not None:
            replica.is_leader = replica.is_ready = False
            return
        ready_response, metrics = await asyncio.gather(
            *(asyncio.to_thread(_read, replica.port, path) for path in ("readyz", "metrics"))
        )
        replica.is_ready = bool(ready_response)
        replica.is_leader = bool(re.search(r"^finetune_leader 1\.0$", metrics, re.MULTILINE))
        if not metrics:
            return
        now = time.monotonic()
        replica.requests = count_requests(metrics)
        if now - replica.resumed_at > LAG_WINDOW_SECONDS and (lag := _find_loop_lag(metrics)) is not None:
            replica.loop_lags.append(lag)
        with suppress(OSError, TypeError):  # the process may end meanwhile
            memory = read_memory_mib(replica.process.pid)
            replica.samples.append(MemorySample(now - self._started_at, now - replica.started_at, memory))
            replica.cpu_seconds = read_cpu_seconds(Path(f"/proc/{replica.process.pid}"))

    def _build_command(self, release: Release, port: int) -> list[str]:
        return [
            *(sys.executable, "-m", "finetune_operator", "--kubeconfig", str(self._kubeconfig)),
            *("--namespace", NAMESPACE, "--lease-name", "soak", "--log-level", "warning"),
            *("--metrics-port", str(port), "--trainer-image", f"localhost/trainer:{release.name}"),
        ]


def _build_environment(release: Release) -> dict[str, str]:
    paths = ":".join(str(release.tree / folder) for folder in ("operator", "trainer"))
    return {**os.environ, "PYTHONPATH": paths}


def _read(port: int, path: str) -> str:
    """Return the body of a successful response, or an empty string."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/{path}", timeout=METRICS_TIMEOUT_SECONDS) as response:
            text: str = response.read().decode()
            return text or "ok"
    except OSError:
        return ""


def _find_loop_lag(metrics: str) -> float | None:
    match = re.search(r"^finetune_event_loop_lag_seconds (\S+)$", metrics, re.MULTILINE)
    return None if match is None else float(match[1])
