"""Partition nodes from the network by silently dropping packets at a node's link, in both directions."""

from __future__ import annotations

import shutil

from testing.cluster.host.commands import run, try_run
from testing.cluster.host.layout import ClusterLayout, NodeLayout
from testing.cluster.node.network import run_in_node

MATCH_ALL = ("",)


def drop_all(node: NodeLayout) -> None:
    """Drop incoming packets inside the node and outgoing packets at the host's end of its link.

    An egress drop inside the node would return an error to the sender.
    """
    table = get_table_name(node)
    run_in_node(node, "nft", "--file", "-", stdin=render_drop_rules(table, device="eth0", matches=MATCH_ALL))
    run("nft", "--file", "-", stdin=render_drop_rules(table, device=node.host_link, matches=MATCH_ALL))


def drop_between(node: NodeLayout, other_node: NodeLayout) -> None:
    """Drop packets between two nodes: each node drops the packets from the other node and its pods."""
    for receiver, sender in ((node, other_node), (other_node, node)):
        script = render_drop_rules(get_table_name(node), device="eth0", matches=build_sender_matches(sender))
        run_in_node(receiver, "nft", "--file", "-", stdin=script)


def build_sender_matches(sender: NodeLayout) -> tuple[str, ...]:
    """Return one match per IP family for packets from a node and its pods."""
    return tuple(
        f"{'ip6' if plan.is_ipv6 else 'ip'} saddr "
        f"{{ {plan.get_node_address(sender.number)}, {plan.get_pod_network(sender.number)} }}"
        for plan in sender.plans
    )


def remove_drop_tables(node: NodeLayout, *, partitioned_node: NodeLayout) -> None:
    """Remove the tables that partition `partitioned_node` from a node and from the host's end of its link."""
    table = ("nft", "delete", "table", "netdev", get_table_name(partitioned_node))
    try_run("nsenter", f"--net={node.network_namespace_path}", *table)
    if node == partitioned_node:
        try_run(*table)


def list_host_drop_tables(layout: ClusterLayout) -> tuple[str, ...]:
    """Return the cluster's nftables on the host, which remain after their device is deleted.

    Newer kernels attach such a table to the next device of that name.
    """
    if not shutil.which("nft"):
        return ()
    lines = (line.split() for line in try_run("nft", "list", "tables", "netdev").stdout.splitlines())
    prefix = layout.device_prefix.replace("-", "_") + "_"
    return tuple(fields[2] for fields in lines if fields[2:] and fields[2].startswith(prefix))


def remove_host_drop_tables(layout: ClusterLayout) -> None:
    for table in list_host_drop_tables(layout):
        run("nft", "delete", "table", "netdev", table)


def get_table_name(node: NodeLayout) -> str:
    """Return a table name unique per cluster and node, because all tables on the host share one namespace."""
    return node.network_namespace.replace("-", "_") + "_partition"


def render_drop_rules(table: str, *, device: str, matches: tuple[str, ...]) -> str:
    """Render an idempotent nft script that drops the packets of each match."""
    rules = "".join(f"add rule netdev {table} incoming {match} counter drop\n" for match in matches)
    return f"""\
table netdev {table} {{
  chain incoming {{
    type filter hook ingress device "{device}" priority -500;
  }}
}}
flush chain netdev {table} incoming
{rules}"""
