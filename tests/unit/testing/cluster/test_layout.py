"""Tests of the networks of a cluster and of its name."""

from ipaddress import IPv4Network
from pathlib import Path

import pytest

from testing.cluster.host.addresses import AddressPlan, IpFamily, build_address_plans, derive_ipv6_network
from testing.cluster.host.layout import MAX_NODES, ClusterLayout, check_name, choose_network

LARGEST = ClusterLayout(name="abcdefgh", root=Path("/c"), node_count=MAX_NODES, network=IPv4Network("10.90.0.0/16"))
PLANS = build_address_plans(LARGEST.network, IpFamily.DUAL)


@pytest.mark.parametrize("plan", PLANS, ids=["IPv4", "IPv6"])
def test_networks_of_nodes_pods_and_services_do_not_overlap(plan: AddressPlan) -> None:
    networks = (plan.node_network, plan.pods_network, plan.services_network)

    assert all(network[0] in plan.network and network[-1] in plan.network for network in networks)
    assert not any(a.overlaps(b) for a in networks for b in networks if a is not b)


@pytest.mark.parametrize("plan", PLANS, ids=["IPv4", "IPv6"])
def test_every_node_has_its_own_address_and_pod_network(plan: AddressPlan) -> None:
    numbers = [node.number for node in LARGEST.nodes]
    addresses = [plan.get_node_address(number) for number in numbers]
    pods = [plan.get_pod_network(number) for number in numbers]

    assert len({*pods}) == MAX_NODES
    assert all(network[0] in plan.pods_network and network[-1] in plan.pods_network for network in pods)
    assert len({*addresses} | {plan.host_address}) == MAX_NODES + 1
    assert all(address in plan.node_network for address in addresses)


def test_network_with_a_route_on_the_host_is_not_chosen() -> None:
    first = choose_network("dev", ())

    second, third = choose_network("dev", [first]), choose_network("dev", [derive_ipv6_network(first)])

    assert choose_network("dev", ()) == first
    assert second == third
    assert not second.overlaps(first)


@pytest.mark.parametrize("name", ["", "Dev", "1st", "too-long", "ninechars"])
def test_cluster_name_that_is_invalid_in_device_names_is_rejected(name: str) -> None:
    with pytest.raises(ValueError, match="at most 8"):
        check_name(name)
