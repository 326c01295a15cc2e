"""Create a bridge on the host and connect one network namespace per node to it."""

from __future__ import annotations

import json
from contextlib import suppress
from ipaddress import ip_network
from pathlib import Path

from testing.cluster.host.addresses import Address, AddressPlan, Network
from testing.cluster.host.commands import run, try_run
from testing.cluster.host.layout import ClusterLayout, NodeLayout


def list_host_routes() -> tuple[Network, ...]:
    """Return all networks to which the host has a route, except the default routes."""
    routes = [
        route
        for family in ("-4", "-6")
        for route in json.loads(run("ip", family, "-json", "route", "show", "table", "all") or "[]")
    ]
    networks = []
    for route in routes:
        with suppress(ValueError):
            networks.append(ip_network(route["dst"], strict=False))
    return tuple(network for network in networks if network.prefixlen)


def ensure_network(layout: ClusterLayout) -> None:
    if not Path(f"/sys/class/net/{layout.bridge}").exists():
        run("ip", "link", "add", layout.bridge, "type", "bridge")
    for plan in layout.plans:
        run(*build_address_command(plan, plan.host_address, device=layout.bridge))
    run("ip", "link", "set", layout.bridge, "up")
    Path("/proc/sys/net/ipv4/ip_forward").write_text("1")
    allow_bridged_traffic(layout)
    for node in layout.nodes:
        ensure_node_network(layout, node)
    for plan in layout.plans:
        ensure_routes(layout, plan)


def ensure_routes(layout: ClusterLayout, plan: AddressPlan) -> None:
    """Create the routes to the pods of each node, and to Services, on the host and on the other nodes."""
    for node in layout.nodes:
        route = (str(plan.get_pod_network(node.number)), "via", str(plan.get_node_address(node.number)))
        run("ip", "route", "replace", *route)
        for other in layout.nodes:
            if other != node:
                run_in_node(other, "ip", "route", "replace", *route)
    # The first node routes webhook requests of the API server to Services, because the host has no kube-proxy.
    first = plan.get_node_address(layout.nodes[0].number)
    run("ip", "route", "replace", str(plan.services_network), "via", str(first))


def ensure_node_network(layout: ClusterLayout, node: NodeLayout) -> None:
    if not node.network_namespace_path.exists():
        run("ip", "netns", "add", node.network_namespace)
    if not Path(f"/sys/class/net/{node.host_link}").exists():
        run(
            *("ip", "link", "add", node.host_link, "type", "veth"),
            *("peer", "name", "eth0", "netns", node.network_namespace),
        )
    run("ip", "link", "set", node.host_link, "master", layout.bridge, "up")
    for plan in layout.plans:
        run_in_node(node, *build_address_command(plan, plan.get_node_address(node.number), device="eth0"))
    run_in_node(node, "ip", "link", "set", "eth0", "up")
    run_in_node(node, "ip", "link", "set", "lo", "up")
    for plan in layout.plans:
        run_in_node(node, "ip", "route", "replace", plan.all_addresses, "via", str(plan.host_address))
        setting = "net/ipv6/conf/all/forwarding" if plan.is_ipv6 else "net/ipv4/ip_forward"
        run_in_node(node, "sh", "-c", f"echo 1 > /proc/sys/{setting}")


def build_address_command(plan: AddressPlan, address: Address, *, device: str) -> tuple[str, ...]:
    """Return the command that adds an address; it can be used at once, because its duplicates are not searched for."""
    command = ("ip", "address", "replace", f"{address}/{plan.subnet_prefix}", "dev", device)
    return (*command, "nodad") if plan.is_ipv6 else command


def run_in_node(node: NodeLayout, *argv: str, stdin: str | None = None) -> str:
    return run("nsenter", f"--net={node.network_namespace_path}", *argv, stdin=stdin)


def build_forward_rule(layout: ClusterLayout) -> tuple[str, ...]:
    return ("FORWARD", "-i", layout.bridge, "-o", layout.bridge, "-j", "ACCEPT")


def allow_bridged_traffic(layout: ClusterLayout) -> None:
    """Accept forwarded packets of the bridge, because Docker sets the host's FORWARD policy to DROP."""
    policy = try_run("iptables", "-w", "-S", "FORWARD")
    if "-P FORWARD DROP" in policy.stdout and try_run("iptables", "-w", "-C", *build_forward_rule(layout)).returncode:
        run("iptables", "-w", "-I", *build_forward_rule(layout))


def remove_network(layout: ClusterLayout) -> None:
    """Delete the cluster's network namespaces and links; the kernel then removes their routes."""
    if "-P FORWARD DROP" in try_run("iptables", "-w", "-S", "FORWARD").stdout:
        try_run("iptables", "-w", "-D", *build_forward_rule(layout))
    for namespace in list_network_namespaces(layout):
        run("ip", "netns", "delete", namespace)
    for link in list_network_links(layout):
        if Path(f"/sys/class/net/{link}").exists():  # a veth may have been removed together with its peer
            try_run("ip", "link", "delete", link)


def list_network_namespaces(layout: ClusterLayout) -> tuple[str, ...]:
    return list_names_with_prefix(layout, Path("/run/netns"))


def list_network_links(layout: ClusterLayout) -> tuple[str, ...]:
    return list_names_with_prefix(layout, Path("/sys/class/net"))


def list_names_with_prefix(layout: ClusterLayout, folder: Path) -> tuple[str, ...]:
    """Return the cluster's entries in a folder, including those of an earlier, larger cluster of this name."""
    prefix = layout.device_prefix
    return tuple(
        sorted(path.name for path in folder.glob(f"{prefix}*") if path.name == prefix or path.name[len(prefix)] == "-")
    )
