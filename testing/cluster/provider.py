"""What tests and the demo ask of a cluster, whichever it is, and how one is chosen."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Protocol

from testing.cluster.current import CurrentProvider
from testing.cluster.fault_injection import Chaos
from testing.cluster.host.cache import Cache
from testing.cluster.host.commands import ClusterError
from testing.cluster.host.preflight import reason_it_cannot_run
from testing.cluster.host.versions import PINNED
from testing.cluster.images.go_build import build_all
from testing.cluster.kind import KindProvider, reason_kind_cannot_run
from testing.cluster.storage import Object, make_shared_folder, shared_claim_objects
from testing.cluster.throwaway import ThrowawayCluster


class ClusterKind(StrEnum):
    THROWAWAY = "throwaway"
    KIND = "kind"
    CURRENT = "current"
    NONE = "none"


class Provider(Protocol):
    """A cluster that images can be brought to, and whose shared claims are folders of this machine."""

    @property
    def cache(self) -> Cache: ...
    @property
    def kubeconfig(self) -> Path: ...
    @property
    def kubectl(self) -> Path: ...
    @property
    def helm(self) -> Path: ...
    @property
    def chaos(self) -> Chaos | None: ...

    def up(self) -> None: ...
    def down(self) -> None: ...
    def load_image(self, archive: Path) -> None: ...

    def shared_folder(self, namespace: str, claim: str) -> Path:
        """What is in the claim, seen from here."""

    def shared_claim(self, namespace: str, claim: str) -> tuple[Object, ...]:
        """Objects to apply so that the claim is bound to that folder on every node."""


@dataclass(frozen=True)
class ThrowawayProvider:
    cluster: ThrowawayCluster

    @property
    def cache(self) -> Cache:
        return self.cluster.cache

    @property
    def kubeconfig(self) -> Path:
        return self.cluster.kubeconfig

    @property
    def kubectl(self) -> Path:
        return self.cluster.kubectl.program

    @property
    def helm(self) -> Path:
        return self.cache.binaries("helm", PINNED.helm) / "helm"

    @property
    def chaos(self) -> Chaos:
        return Chaos(self.cluster)

    def up(self) -> None:
        build_all(self.cache, PINNED, only=("helm",))
        self.cluster.up()

    def down(self) -> None:
        self.cluster.down()

    def load_image(self, archive: Path) -> None:
        self.cluster.load_image(archive)

    def shared_folder(self, namespace: str, claim: str) -> Path:
        return make_shared_folder(self.cluster.layout.shared, namespace, claim)

    def shared_claim(self, namespace: str, claim: str) -> tuple[Object, ...]:
        folder = self.shared_folder(namespace, claim)
        return shared_claim_objects(namespace, claim, host_path=str(folder))


@dataclass(frozen=True)
class Choice:
    """`why` is for people: why this kind, or why none."""

    kind: ClusterKind
    why: str
    provider: Provider | None


def choose_provider(environment: Mapping[str, str]) -> Choice:
    """As CLUSTER says (throwaway, kind, current, none); without it, what this machine can do."""
    wanted = environment.get("CLUSTER", "")
    if wanted and wanted not in tuple(ClusterKind):
        raise ClusterError(f"CLUSTER={wanted}: expected one of {', '.join(ClusterKind)}")
    if wanted:
        return Choice(ClusterKind(wanted), f"CLUSTER={wanted}", make_provider(ClusterKind(wanted), environment))
    no_kind = reason_kind_cannot_run()
    if no_kind is None:
        return Choice(ClusterKind.KIND, "Docker runs here", make_provider(ClusterKind.KIND, {}))
    no_throwaway = reason_it_cannot_run() or reason_there_is_no_go()
    if no_throwaway is None:
        provider = make_provider(ClusterKind.THROWAWAY, {})
        return Choice(ClusterKind.THROWAWAY, f"{no_kind}, but this is root on Linux with Go", provider)
    return Choice(ClusterKind.NONE, f"{no_kind}; {no_throwaway}", None)


def reason_there_is_no_go() -> str | None:
    return None if shutil.which("go") else "the throwaway cluster is built with Go, which is not installed"


def make_provider(kind: ClusterKind, environment: Mapping[str, str]) -> Provider | None:
    cache = Cache.from_environment()
    match kind:
        case ClusterKind.THROWAWAY:
            return ThrowawayProvider(ThrowawayCluster.named())
        case ClusterKind.KIND:
            return KindProvider(cache)
        case ClusterKind.CURRENT:
            return CurrentProvider.from_environment(cache, environment)
        case ClusterKind.NONE:
            return None
