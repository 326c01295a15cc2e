"""Tests of the names, addresses and networks of a cluster."""

from ipaddress import IPv4Network
from pathlib import Path

import pytest

from testing.cluster.host.layout import MAX_NODES, ClusterLayout, check_name, check_root, choose_network

LARGEST = ClusterLayout(name="abcdefgh", root=Path("/c"), node_count=MAX_NODES, network=IPv4Network("10.90.0.0/16"))
LONGEST_DEVICE_NAME = 15


def test_device_names_fit_the_kernel_limit_for_the_longest_cluster_name() -> None:
    names = {LARGEST.bridge, *(node.host_link for node in LARGEST.nodes)}

    assert len(names) == MAX_NODES + 1
    assert max(map(len, names)) <= LONGEST_DEVICE_NAME


def test_networks_of_nodes_pods_and_services_do_not_overlap() -> None:
    networks = (LARGEST.node_network, LARGEST.pods_network, LARGEST.services_network)

    assert all(network.subnet_of(LARGEST.network) for network in networks)
    assert not any(a.overlaps(b) for a in networks for b in networks if a is not b)


def test_every_node_has_its_own_address_and_pod_network() -> None:
    pods = [node.pod_network for node in LARGEST.nodes]

    assert len({*pods}) == MAX_NODES
    assert all(network.subnet_of(LARGEST.pods_network) for network in pods)
    assert len({node.address for node in LARGEST.nodes} | {LARGEST.host_address}) == MAX_NODES + 1
    assert all(node.address in LARGEST.node_network for node in LARGEST.nodes)


def test_network_with_a_route_on_the_host_is_not_chosen() -> None:
    first = choose_network("dev", ())

    second = choose_network("dev", [first])

    assert choose_network("dev", ()) == first
    assert not second.overlaps(first)


def test_clusters_with_different_names_use_different_networks() -> None:
    assert choose_network("dev", ()) != choose_network("bench", ())


def test_error_is_raised_if_no_network_is_free() -> None:
    with pytest.raises(ValueError, match="no free network"):
        choose_network("dev", [IPv4Network("10.0.0.0/8")])


@pytest.mark.parametrize("name", ["", "Dev", "1st", "too-long", "ninechars"])
def test_cluster_name_that_is_invalid_in_device_names_is_rejected(name: str) -> None:
    with pytest.raises(ValueError, match="at most 8"):
        check_name(name)


def test_root_that_is_too_long_for_socket_paths_is_rejected() -> None:
    with pytest.raises(ValueError, match="FINETUNE_CACHE"):
        check_root(Path("/" + "x" * 60))
