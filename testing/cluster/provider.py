"""Interface and selection of the cluster on which the tests and the demo run."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Protocol

from testing.cluster.current import CurrentContextProvider
from testing.cluster.fault_injection import Chaos
from testing.cluster.host.addresses import IpFamily
from testing.cluster.host.cache import Cache
from testing.cluster.host.commands import HarnessError
from testing.cluster.host.preflight import find_host_problem
from testing.cluster.host.versions import PINNED, ComponentVersions
from testing.cluster.images.go_build import build_all
from testing.cluster.kind import KindProvider, find_kind_problem
from testing.cluster.storage import Object, create_shared_folder, render_shared_claim
from testing.cluster.throwaway import DEFAULT_NAME, ThrowawayCluster


class ClusterKind(StrEnum):
    """Values of the environment variable CLUSTER."""

    THROWAWAY = "throwaway"
    KIND = "kind"
    CURRENT = "current"
    NONE = "none"


class ClusterProvider(Protocol):
    """A cluster that loads images and stores shared claims in folders of this host."""

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

    def get_shared_folder(self, namespace: str, claim: str) -> Path:
        """Return the folder on this host that contains the claim's data."""

    def build_shared_claim_objects(self, namespace: str, claim: str) -> tuple[Object, ...]:
        """Return the Kubernetes objects that bind the claim to its shared folder on every node."""


@dataclass(frozen=True)
class ThrowawayProvider:
    """Provider for the throwaway cluster, the only one with fault injection."""

    cluster: ThrowawayCluster
    versions: ComponentVersions = PINNED
    ip_family: IpFamily = IpFamily.IPV4
    pod_groups: bool = False

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> ThrowawayProvider:
        """Return the provider with the name, version and IP family in CLUSTER_NAME, _KUBERNETES and _IP_FAMILY."""
        family = environment.get("CLUSTER_IP_FAMILY", IpFamily.IPV4)
        if family not in tuple(IpFamily):
            raise HarnessError(f"CLUSTER_IP_FAMILY={family}: expected one of {', '.join(IpFamily)}")
        version = environment.get("CLUSTER_KUBERNETES", PINNED.kubernetes)
        cluster = ThrowawayCluster.from_name(environment.get("CLUSTER_NAME", DEFAULT_NAME))
        return cls(cluster, replace(PINNED, kubernetes=version), IpFamily(family))

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
        return self.cache.get_binary_folder("helm", PINNED.helm) / "helm"

    @property
    def chaos(self) -> Chaos:
        return Chaos(self.cluster)

    def up(self) -> None:
        build_all(self.cache, PINNED, component_names=("helm",))
        self.cluster.up(versions=self.versions, ip_family=self.ip_family, pod_groups=self.pod_groups)

    def down(self) -> None:
        self.cluster.down()

    def load_image(self, archive: Path) -> None:
        self.cluster.load_image(archive)

    def get_shared_folder(self, namespace: str, claim: str) -> Path:
        return create_shared_folder(self.cluster.layout.shared_root, namespace, claim)

    def build_shared_claim_objects(self, namespace: str, claim: str) -> tuple[Object, ...]:
        folder = self.get_shared_folder(namespace, claim)
        return render_shared_claim(namespace, claim, host_path=str(folder))


@dataclass(frozen=True)
class ProviderChoice:
    """The selected cluster, if any, and the reason for the selection."""

    kind: ClusterKind
    explanation: str
    provider: ClusterProvider | None


def choose_provider(environment: Mapping[str, str]) -> ProviderChoice:
    """Return the cluster selected by CLUSTER (throwaway, kind, current, none).

    By default, it is a cluster that the host supports.
    """
    requested_kind = environment.get("CLUSTER", "")
    if requested_kind and requested_kind not in tuple(ClusterKind):
        raise HarnessError(f"CLUSTER={requested_kind}: expected one of {', '.join(ClusterKind)}")
    if requested_kind:
        kind = ClusterKind(requested_kind)
        return ProviderChoice(kind, f"CLUSTER={requested_kind}", create_provider(kind, environment))
    kind_problem = find_kind_problem()
    if kind_problem is None:
        return ProviderChoice(ClusterKind.KIND, "Docker is running", create_provider(ClusterKind.KIND, {}))
    throwaway_problem = find_host_problem() or find_go_problem()
    if throwaway_problem is None:
        provider = create_provider(ClusterKind.THROWAWAY, environment)
        explanation = f"{kind_problem}; this host has root, Linux and Go"
        return ProviderChoice(ClusterKind.THROWAWAY, explanation, provider)
    return ProviderChoice(ClusterKind.NONE, f"{kind_problem}; {throwaway_problem}", None)


def find_go_problem() -> str | None:
    return None if shutil.which("go") else "the throwaway cluster is built with Go, which is not installed"


def create_provider(kind: ClusterKind, environment: Mapping[str, str]) -> ClusterProvider | None:
    cache = Cache.from_environment()
    match kind:
        case ClusterKind.THROWAWAY:
            return ThrowawayProvider.from_environment(environment)
        case ClusterKind.KIND:
            return KindProvider(cache)
        case ClusterKind.CURRENT:
            return CurrentContextProvider.from_environment(cache, environment)
        case ClusterKind.NONE:
            return None
