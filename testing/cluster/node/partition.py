"""Network partitions: packets vanish at the node's link, in both directions, and nobody is told."""

from __future__ import annotations

import shutil

from testing.cluster.host.commands import attempt, run
from testing.cluster.host.layout import Layout, NodeLayout
from testing.cluster.node.network import in_node

EVERYTHING = ""


def drop_all(node: NodeLayout) -> None:
    """What comes is dropped inside the node, what it sends on the host's end of its link.

    On the way out of the node itself a drop would be an error that the sender sees.
    """
    in_node(node, "nft", "--file", "-", stdin=render_drops(table_name(node), device="eth0", matching=EVERYTHING))
    run("nft", "--file", "-", stdin=render_drops(table_name(node), device=node.host_link, matching=EVERYTHING))


def drop_between(node: NodeLayout, other: NodeLayout) -> None:
    """Each of the two drops what comes from the other and its pods."""
    for receiver, sender in ((node, other), (other, node)):
        matching = f"ip saddr {{ {sender.address}, {sender.pod_network} }}"
        in_node(receiver, "nft", "--file", "-", stdin=render_drops(table_name(node), device="eth0", matching=matching))


def forget_drops(holder: NodeLayout, *, because_of: NodeLayout) -> None:
    """Remove what was set up in one node, and on the host's end of its link, because of a partition of another."""
    table = ("nft", "delete", "table", "netdev", table_name(because_of))
    attempt("nsenter", f"--net={holder.network_namespace_path}", *table)
    if holder == because_of:
        attempt(*table)


def tables_on_host(layout: Layout) -> tuple[str, ...]:
    """They outlive their device, and newer kernels attach them again to the next device of that name."""
    if not shutil.which("nft"):
        return ()
    lines = (line.split() for line in attempt("nft", "list", "tables", "netdev").stdout.splitlines())
    prefix = layout.device_prefix.replace("-", "_") + "_"
    return tuple(words[2] for words in lines if words[2:] and words[2].startswith(prefix))


def forget_drops_on_host(layout: Layout) -> None:
    for table in tables_on_host(layout):
        run("nft", "delete", "table", "netdev", table)


def table_name(node: NodeLayout) -> str:
    """Per node and cluster, since those of the host's ends all lie in the host's own namespace."""
    return node.network_namespace.replace("-", "_") + "_partition"


def render_drops(table: str, *, device: str, matching: str) -> str:
    """An nft script; said twice it changes nothing."""
    return f"""\
table netdev {table} {{
  chain incoming {{
    type filter hook ingress device "{device}" priority -500;
  }}
}}
flush chain netdev {table} incoming
add rule netdev {table} incoming {matching} counter drop
"""
