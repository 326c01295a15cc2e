"""Networks and addresses of a cluster, one plan per IP family, without changing the host."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network

Address = IPv4Address | IPv6Address
Network = IPv4Network | IPv6Network

FIRST_POD_SUBNET = 64
FIRST_SERVICE_SUBNET = 128


class IpFamily(StrEnum):
    """IP families of the nodes, pods and Services of a cluster."""

    IPV4 = "ipv4"
    IPV6 = "ipv6"
    DUAL = "dual"
    """Both families; IPv4 is the primary one."""


@dataclass(frozen=True)
class AddressPlan:
    """Networks and addresses of a cluster in one IP family.

    The network, a /16 of IPv4 or a /48 of IPv6, is divided into subnets (/24 or /64): number 0 for the host and the
    nodes, one for the pods of each node from number 64, and those from number 128 for Services.
    """

    network: Network

    @property
    def is_ipv6(self) -> bool:
        return self.network.version == 6

    @property
    def subnet_prefix(self) -> int:
        """Prefix length of the network of the nodes and of the pod network of each node."""
        return 64 if self.is_ipv6 else 24

    @property
    def host_address(self) -> Address:
        return self.network[1]

    @property
    def node_network(self) -> Network:
        return self._get_subnets(0, prefix=self.subnet_prefix)

    @property
    def pods_network(self) -> Network:
        """Pod network; it excludes the host, so that kube-proxy masquerades requests from the host to a Service."""
        return self._get_subnets(FIRST_POD_SUBNET, prefix=self.subnet_prefix - 6)

    @property
    def services_network(self) -> Network:
        return self._get_subnets(FIRST_SERVICE_SUBNET, prefix=112 if self.is_ipv6 else 17)

    @property
    def all_addresses(self) -> str:
        """Destination of a default route."""
        return "::/0" if self.is_ipv6 else "0.0.0.0/0"

    def get_node_address(self, number: int) -> Address:
        return self.network[10 + number]

    def get_pod_network(self, number: int) -> Network:
        return self._get_subnets(FIRST_POD_SUBNET + number, prefix=self.subnet_prefix)

    def _get_subnets(self, first_subnet: int, *, prefix: int) -> Network:
        """Return the network with this prefix length that begins at a subnet."""
        offset = first_subnet << (self.network.max_prefixlen - self.subnet_prefix)
        return type(self.network)((int(self.network.network_address) + offset, prefix))


def build_address_plans(network: IPv4Network, ip_family: IpFamily) -> tuple[AddressPlan, ...]:
    """Return the plans of a cluster, the one of its primary IP family first."""
    ipv4, ipv6 = AddressPlan(network), AddressPlan(derive_ipv6_network(network))
    return {IpFamily.IPV4: (ipv4,), IpFamily.IPV6: (ipv6,), IpFamily.DUAL: (ipv4, ipv6)}[ip_family]


def derive_ipv6_network(network: IPv4Network) -> IPv6Network:
    """Return the /48 that belongs to a /16 of IPv4, for example fd10:90::/48 for 10.90.0.0/16."""
    _, octet, *_ = str(network.network_address).split(".")
    return IPv6Network(f"fd10:{octet}::/48")


def format_url_host(address: Address) -> str:
    """Format an address as the host of a URL, which has brackets for IPv6."""
    return f"[{address}]" if address.version == 6 else str(address)
