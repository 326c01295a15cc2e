"""Tests of the addresses, namespaces and networks of the programs of the cluster."""

import json
from dataclasses import replace
from ipaddress import IPv4Network
from pathlib import Path

from testing.cluster.host.addresses import IpFamily
from testing.cluster.host.cache import Cache
from testing.cluster.host.layout import ClusterLayout
from testing.cluster.host.processes import Daemon
from testing.cluster.host.versions import PINNED
from testing.cluster.node.config_files import (
    render_cni_config,
    render_corefile,
    render_kubelet_config,
)
from testing.cluster.node.partition import MATCH_ALL, build_sender_matches, render_drop_rules
from testing.cluster.node.program_arguments import build_control_plane_daemons, build_node_daemons

LAYOUT = ClusterLayout(name="dev", root=Path("/cache/cluster/dev"), node_count=2, network=IPv4Network("10.90.0.0/16"))
IPV6, DUAL = (replace(LAYOUT, ip_family=family) for family in (IpFamily.IPV6, IpFamily.DUAL))
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


def get_option(daemon: Daemon, name: str) -> str:
    (value,) = (word.removeprefix(f"--{name}=") for word in daemon.argv if word.startswith(f"--{name}="))
    return value


def test_programs_of_a_dual_stack_cluster_have_networks_of_both_families() -> None:
    api_server = build_control_plane_daemons(DUAL, CACHE, PINNED)[1]
    _, kubelet, kube_proxy = build_node_daemons(DUAL, DUAL.nodes[0], CACHE, PINNED)

    assert get_option(api_server, "service-cluster-ip-range") == "10.90.128.0/17,fd10:90:0:80::/112"
    assert get_option(kubelet, "node-ip") == "10.90.0.11,fd10:90::b"
    assert get_option(kube_proxy, "cluster-cidr") == "10.90.64.0/18,fd10:90:0:40::/58"
    ipam = json.loads(render_cni_config(DUAL.nodes[0]))["plugins"][0]["ipam"]
    assert ipam["ranges"] == [[{"subnet": "10.90.65.0/24"}], [{"subnet": "fd10:90:0:41::/64"}]]
    assert ipam["routes"] == [{"dst": "0.0.0.0/0"}, {"dst": "::/0"}]


def test_programs_of_an_ipv6_cluster_use_only_ipv6_addresses() -> None:
    daemons = build_control_plane_daemons(IPV6, CACHE, PINNED)
    nodes = build_node_daemons(IPV6, IPV6.nodes[0], CACHE, PINNED)
    command_lines = [" ".join(daemon.argv) for daemon in (*daemons, *nodes)]

    assert not [line for line in command_lines if "10.90." in line]
    assert "--etcd-servers=http://[fd10:90::1]:22379" in command_lines[1]
    assert json.loads(render_kubelet_config(IPV6, IPV6.nodes[0]))["address"] == "::"
    corefile = render_corefile(IPV6, cache_answers=False)
    assert "bind fd10:90::1\n" in corefile
    assert "ready [fd10:90::1]:28181" in corefile
