"""Parameters of a started cluster, stored in its folder for later commands."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from ipaddress import IPv4Network
from pathlib import Path

from testing.cluster.host.addresses import IpFamily
from testing.cluster.host.commands import HarnessError
from testing.cluster.host.layout import ClusterLayout
from testing.cluster.host.versions import ComponentVersions


@dataclass(frozen=True)
class ClusterState:
    """Parameters of a started cluster."""

    name: str
    node_count: int
    network: str
    versions: ComponentVersions
    dns_cache: bool = False
    ip_family: IpFamily = IpFamily.IPV4
    pod_groups: bool = False  # gang scheduling by the scheduler of Kubernetes

    def layout(self, root: Path) -> ClusterLayout:
        return ClusterLayout(
            name=self.name,
            root=root,
            node_count=self.node_count,
            network=IPv4Network(self.network),
            ip_family=self.ip_family,
        )

    @property
    def description(self) -> str:
        """Nodes, versions and IP family; a running cluster keeps them."""
        components = ", ".join(f"{name} {version}" for name, version in asdict(self.versions).items())
        groups = ", PodGroups" if self.pod_groups else ""
        return f"{self.node_count} nodes, {self.ip_family}, {components}{groups}"

    def with_dns_cache(self, enabled: bool) -> ClusterState:
        return replace(self, dns_cache=enabled)


def get_state_file(root: Path) -> Path:
    return root / "cluster.json"


def write_state(root: Path, state: ClusterState) -> None:
    root.mkdir(parents=True, exist_ok=True)
    get_state_file(root).write_text(json.dumps(asdict(state), indent=2) + "\n")


def read_state(root: Path) -> ClusterState | None:
    try:
        document = json.loads(get_state_file(root).read_text())
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise HarnessError(f"{get_state_file(root)} is unreadable ({error}); run `down`") from error
    versions = ComponentVersions(**document["versions"])
    ip_family = IpFamily(document.get("ip_family", IpFamily.IPV4))
    return ClusterState(**{**document, "versions": versions, "ip_family": ip_family})


def require_state(root: Path) -> ClusterState:
    state = read_state(root)
    if state is None:
        raise HarnessError(f"cluster {root.name} is not up ({get_state_file(root)} is missing); run `up` first")
    return state
