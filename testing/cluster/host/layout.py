"""Compute the folders, addresses and device names of a cluster, without changing the host."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection
from dataclasses import dataclass
from ipaddress import IPv4Network
from pathlib import Path

from testing.cluster.host.addresses import (
    Address,
    AddressPlan,
    IpFamily,
    Network,
    build_address_plans,
    derive_ipv6_network,
    format_url_host,
)

NAME = re.compile(r"[a-z][a-z0-9]{0,7}")
MAX_NODES = 20
MAX_ROOT_LENGTH = 60
API_SERVER_PORT = 26443
ETCD_PORT = 22379
ETCD_PEER_PORT = 22380
DNS_READY_PORT = 28181


@dataclass(frozen=True)
class NodeLayout:
    """Folders, addresses and device names of one cluster node."""

    name: str
    root: Path
    device_prefix: str
    number: int
    plans: tuple[AddressPlan, ...]
    """Address plans of the cluster, the one of its primary IP family first."""

    @property
    def network_namespace(self) -> str:
        return f"{self.device_prefix}-n{self.number}"

    @property
    def network_namespace_path(self) -> Path:
        return Path("/run/netns") / self.network_namespace

    @property
    def cgroup(self) -> str:
        return f"{self.device_prefix}-n{self.number}"

    @property
    def host_link(self) -> str:
        return f"{self.device_prefix}-{self.number}"

    @property
    def addresses(self) -> tuple[Address, ...]:
        return tuple(plan.get_node_address(self.number) for plan in self.plans)

    @property
    def pod_networks(self) -> tuple[Network, ...]:
        return tuple(plan.get_pod_network(self.number) for plan in self.plans)

    @property
    def containerd_root(self) -> Path:
        """Data folder of containerd; `down` keeps it, so that images need not be imported again."""
        return self.root / "containerd"

    @property
    def containerd_state(self) -> Path:
        return self.root / "run"

    @property
    def containerd_socket(self) -> Path:
        return self.root / "containerd.sock"


@dataclass(frozen=True)
class ClusterLayout:
    """Folders, addresses and device names of the cluster."""

    name: str
    root: Path
    node_count: int
    network: IPv4Network
    ip_family: IpFamily = IpFamily.IPV4

    @property
    def device_prefix(self) -> str:
        """Name prefix of the cluster's bridge, links, network namespaces and cgroups; Linux allows 15 characters."""
        return f"ftc-{self.name}"

    @property
    def bridge(self) -> str:
        return self.device_prefix

    @property
    def plans(self) -> tuple[AddressPlan, ...]:
        return build_address_plans(self.network, self.ip_family)

    @property
    def host_address(self) -> Address:
        """Address of the control plane, in the primary IP family."""
        return self.plans[0].host_address

    @property
    def url_host(self) -> str:
        return format_url_host(self.host_address)

    @property
    def api_server(self) -> str:
        return f"https://{self.url_host}:{API_SERVER_PORT}"

    @property
    def nodes(self) -> tuple[NodeLayout, ...]:
        return tuple(
            NodeLayout(
                name=f"node{number}",
                root=self.root / f"node{number}",
                device_prefix=self.device_prefix,
                number=number,
                plans=self.plans,
            )
            for number in range(1, self.node_count + 1)
        )

    @property
    def pki(self) -> Path:
        return self.root / "pki"

    @property
    def shared_root(self) -> Path:
        return self.root / "shared"

    @property
    def daemons(self) -> Path:
        return self.root / "daemons"

    @property
    def corefile(self) -> Path:
        return self.root / "Corefile"

    def kubeconfig(self, user: str) -> Path:
        return self.root / f"{user}.kubeconfig"


def check_name(name: str) -> str:
    if not NAME.fullmatch(name):
        raise ValueError(
            f"cluster name {name!r}: at most 8 of a-z and 0-9, a letter first (it becomes part of device names)"
        )
    return name


def check_root(root: Path) -> Path:
    if len(str(root)) > MAX_ROOT_LENGTH:
        raise ValueError(
            f"{root} is longer than {MAX_ROOT_LENGTH} characters: socket paths below it would exceed "
            "108 characters; set FINETUNE_CACHE to a shorter path"
        )
    return root


def choose_network(name: str, host_routes: Collection[Network]) -> IPv4Network:
    """Return a /16 network that overlaps no route of the host; the first candidate depends on the cluster's name.

    The network of IPv6 that is derived from it overlaps no route either.
    """
    candidates = [IPv4Network(f"10.{octet}.0.0/16") for octet in range(80, 240)]
    first = int(hashlib.sha256(name.encode()).hexdigest(), 16) % len(candidates)
    for candidate in candidates[first:] + candidates[:first]:
        networks = (candidate, derive_ipv6_network(candidate))
        if not any(network.overlaps(route) for network in networks for route in host_routes):
            return candidate
    raise ValueError("no free network between 10.80.0.0/16 and 10.239.0.0/16: the host has routes for all of them")
