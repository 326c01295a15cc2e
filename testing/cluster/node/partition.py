"""Network partitions: packets are silently dropped at the node's link, in both directions."""

from __future__ import annotations

import shutil

from testing.cluster.host.commands import attempt, run
from testing.cluster.host.layout import Layout, NodeLayout
from testing.cluster.node.network import run_in_node

EVERYTHING = ""


def drop_all(node: NodeLayout) -> None:
    """Drop incoming packets inside the node and outgoing packets at the host's end of its link.

    An egress drop inside the node would return an error to the sender.
    """
    table = table_name(node)
    run_in_node(node, "nft", "--file", "-", stdin=render_drop_rules(table, device="eth0", matching=EVERYTHING))
    run("nft", "--file", "-", stdin=render_drop_rules(table, device=node.host_link, matching=EVERYTHING))


def drop_between(node: NodeLayout, other: NodeLayout) -> None:
    """Drop in each of the two nodes the packets from the other node and its pods."""
    for receiver, sender in ((node, other), (other, node)):
        matching = f"ip saddr {{ {sender.address}, {sender.pod_network} }}"
        script = render_drop_rules(table_name(node), device="eth0", matching=matching)
        run_in_node(receiver, "nft", "--file", "-", stdin=script)


def remove_drop_tables(node: NodeLayout, *, partitioned: NodeLayout) -> None:
    """Remove from a node, and from the host's end of its link, the tables of the partition of `partitioned`."""
    table = ("nft", "delete", "table", "netdev", table_name(partitioned))
    attempt("nsenter", f"--net={node.network_namespace_path}", *table)
    if node == partitioned:
        attempt(*table)


def host_drop_tables(layout: Layout) -> tuple[str, ...]:
    """Return the cluster's nftables on the host; they remain after their device is deleted.

    Newer kernels attach them again to the next device of that name.
    """
    if not shutil.which("nft"):
        return ()
    lines = (line.split() for line in attempt("nft", "list", "tables", "netdev").stdout.splitlines())
    prefix = layout.device_prefix.replace("-", "_") + "_"
    return tuple(fields[2] for fields in lines if fields[2:] and fields[2].startswith(prefix))


def remove_host_drop_tables(layout: Layout) -> None:
    for table in host_drop_tables(layout):
        run("nft", "delete", "table", "netdev", table)


def table_name(node: NodeLayout) -> str:
    """Return a name unique per cluster and node, because the tables of all host ends share one namespace."""
    return node.network_namespace.replace("-", "_") + "_partition"


def render_drop_rules(table: str, *, device: str, matching: str) -> str:
    """Render an idempotent nft script."""
    return f"""\
table netdev {table} {{
  chain incoming {{
    type filter hook ingress device "{device}" priority -500;
  }}
}}
flush chain netdev {table} incoming
add rule netdev {table} incoming {matching} counter drop
"""
