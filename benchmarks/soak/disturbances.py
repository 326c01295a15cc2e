"""Disturbances of the operator: kills, pauses, and upgrades to the next release and back, in turns."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from benchmarks.load.job_bodies import JOBS_PATH, RawBody, build_job_body
from benchmarks.soak.replicas import Replica, ReplicaPair
from benchmarks.soak.requests import create, delete
from benchmarks.soak.state import SoakState
from finetune_operator.kube.api_client import ApiClient
from finetune_operator.kube.api_paths import extend_path
from testing.cluster.throwaway import ThrowawayCluster
from testing.upgrade.releases import Release

PAUSES_SECONDS = (4, 12, 25, 45)
PROBE_TIMEOUT_SECONDS = 120.0
CRD_PATH = "manifests/crd/finetunejobs.yaml"


class Kind(StrEnum):
    """Kind of a disturbance."""

    PAUSE = "pause"
    KILL = "kill"
    UPGRADE = "upgrade"


class Target(StrEnum):
    """Replicas that a disturbance affects."""

    LEADER = "leader"
    STANDBY = "standby"
    BOTH = "both"


@dataclass(frozen=True)
class Disturbance:
    """One disturbance; an upgrade replaces both replicas."""

    kind: Kind
    target: Target = Target.BOTH
    seconds: int = 0  # of a pause

    def __str__(self) -> str:
        if self.kind is Kind.PAUSE:
            return f"pause {self.target} {self.seconds} s"
        return str(self.kind) if self.kind is Kind.UPGRADE else f"kill {self.target}"


DISTURBANCES = {
    Kind.PAUSE: tuple(Disturbance(Kind.PAUSE, target, seconds) for seconds in PAUSES_SECONDS for target in Target),
    Kind.KILL: tuple(Disturbance(Kind.KILL, target) for target in Target),
    Kind.UPGRADE: (Disturbance(Kind.UPGRADE),),
}


@dataclass(frozen=True)
class Effect:
    """Measured effect of a disturbance; all times in seconds, `started_at` and `ended_at` of the monotonic clock.

    until_ready: from the end of a pause, or from a kill or the begin of an upgrade, until both replicas are ready.
    until_pod: from the begin until the pod of a job that was created at the begin exists; None if it never did.
    """

    title: str
    started_at: float
    ended_at: float
    until_ready: float
    until_pod: float | None


def plan_disturbances(kinds: Sequence[Kind], random_source: random.Random) -> Iterator[Disturbance]:
    """Yield disturbances of the kinds in turns; each one of a kind occurs before one of that kind is repeated."""
    decks: dict[Kind, list[Disturbance]] = {kind: [] for kind in kinds}
    while True:
        for kind, deck in decks.items():
            if not deck:
                deck.extend(random_source.sample(DISTURBANCES[kind], len(DISTURBANCES[kind])))
            yield deck.pop()


class Disturber:
    """Disturbs the operator until cancelled, and measures how long it takes until the operator works again."""

    def __init__(
        self,
        pair: ReplicaPair,
        state: SoakState,
        *,
        api: ApiClient,
        cluster: ThrowawayCluster,
        releases: tuple[Release, Release],
    ) -> None:
        self.effects: list[Effect] = []
        self._api = api
        self._pair = pair
        self._state = state
        self._cluster = cluster
        self._release, self._other_release = releases

    async def run(self, disturbances: Iterator[Disturbance], *, rest_seconds: float, deadline: float) -> None:
        """Perform the disturbances, each after a rest, as long as one fits before the deadline."""
        for disturbance in disturbances:
            await asyncio.sleep(rest_seconds)
            if time.monotonic() + disturbance.seconds > deadline:
                return
            await self._disturb(disturbance)

    async def _disturb(self, disturbance: Disturbance) -> None:
        title = str(disturbance)
        started_at = recovery_started_at = time.monotonic()
        match disturbance.kind:
            case Kind.PAUSE:
                targets = self._select(disturbance.target)
                for replica in targets:
                    replica.pause()
                probe = asyncio.create_task(self._measure_probe(started_at, disturbance.seconds))
                await asyncio.sleep(disturbance.seconds)
                for replica in targets:
                    replica.resume()
                recovery_started_at = time.monotonic()
            case Kind.KILL:
                for replica in self._select(disturbance.target):
                    self._pair.kill(replica)
                probe = asyncio.create_task(self._measure_probe(started_at, 0))
            case Kind.UPGRADE:
                title = f"{self._release.name} replaced by {self._other_release.name}"
                probe = asyncio.create_task(self._measure_probe(started_at, 0))
                await self._switch_release()
        await self._pair.wait_until_ready()
        until_ready = time.monotonic() - recovery_started_at
        self.effects.append(Effect(title, started_at, time.monotonic(), until_ready, await probe))

    def _select(self, target: Target) -> list[Replica]:
        leader = self._pair.find_leader()
        return [
            replica
            for replica in self._pair.replicas
            if target is Target.BOTH or (replica is leader) == (target is Target.LEADER)
        ]

    async def _switch_release(self) -> None:
        """Apply the other CRD, and replace one replica after the other as a Deployment does, the leader last."""
        self._release, self._other_release = self._other_release, self._release
        await asyncio.to_thread(apply_crd, self._cluster, self._release)
        for replica in sorted(self._pair.replicas, key=lambda replica: replica.is_leader):
            await self._pair.wait_until_ready(self._pair.start(self._release))
            if replica in self._pair.replicas:  # it may have exited meanwhile
                await self._pair.stop(replica)

    async def _measure_probe(self, started_at: float, pause_seconds: float) -> float | None:
        """Create a job; return the seconds from the begin of the disturbance until its pod exists."""
        name = f"probe-{len(self.effects):03}"
        body: RawBody = build_job_body(name, 1)
        await create(self._api, JOBS_PATH, body)
        deadline = started_at + pause_seconds + PROBE_TIMEOUT_SECONDS
        seconds = None
        while time.monotonic() < deadline and seconds is None:
            await asyncio.sleep(0.1)
            if f"{name}-0-0" in self._state.pods:
                seconds = time.monotonic() - started_at
        if seconds is None:
            self._state.problems.append(f"{name} has no pod {PROBE_TIMEOUT_SECONDS:.0f} s after the disturbance")
        await delete(self._api, extend_path(JOBS_PATH, name))
        return seconds


def apply_crd(cluster: ThrowawayCluster, release: Release) -> None:
    """Apply the CRD of the release."""
    cluster.kubectl("apply", "--server-side", "--force-conflicts", "-f", str(release.tree / CRD_PATH))
