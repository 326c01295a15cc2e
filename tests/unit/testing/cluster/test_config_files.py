"""Tests of the addresses, namespaces and packet filters of the programs of the cluster."""

from dataclasses import replace
from ipaddress import IPv4Network
from pathlib import Path

from testing.cluster.host.addresses import IpFamily
from testing.cluster.host.cache import Cache
from testing.cluster.host.layout import ClusterLayout
from testing.cluster.host.versions import PINNED
from testing.cluster.node.partition import MATCH_ALL, build_sender_matches, render_drop_rules
from testing.cluster.node.program_arguments import build_control_plane_daemons, build_node_daemons

LAYOUT = ClusterLayout(name="dev", root=Path("/cache/cluster/dev"), node_count=2, network=IPv4Network("10.90.0.0/16"))
DUAL = replace(LAYOUT, ip_family=IpFamily.DUAL)
CACHE = Cache(Path("/cache"))


def test_control_plane_listens_only_on_the_host_address_of_the_cluster() -> None:
    for daemon in build_control_plane_daemons(LAYOUT, CACHE, PINNED):
        assert "0.0.0.0" not in " ".join(daemon.argv)
        assert "127.0.0.1" not in " ".join(daemon.argv)


def test_all_programs_of_a_node_run_in_its_network_namespace() -> None:
    daemons = build_node_daemons(LAYOUT, LAYOUT.nodes[1], CACHE, PINNED)

    assert [daemon.name for daemon in daemons] == ["containerd-node2", "kubelet-node2", "kube-proxy-node2"]
    assert all(daemon.argv[:2] == ("nsenter", "--net=/run/netns/ftc-dev-n2") for daemon in daemons)


def test_partition_between_two_nodes_drops_only_packets_between_them() -> None:
    everything = render_drop_rules("t", device="eth0", matches=MATCH_ALL)
    between = render_drop_rules("t", device="eth0", matches=build_sender_matches(DUAL.nodes[0]))

    assert "incoming  counter drop" in everything
    assert "ip saddr { 10.90.0.11, 10.90.65.0/24 } counter drop" in between
    assert "ip6 saddr { fd10:90::b, fd10:90:0:41::/64 } counter drop" in between
