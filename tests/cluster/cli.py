"""The verbs of `python -m cluster`."""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path

from cluster.commands import ClusterError
from cluster.gobuild import build_all
from cluster.throwaway import ThrowawayCluster
from cluster.versions import PINNED


def main(arguments: list[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    try:
        options.verb(options)
    except ClusterError as reason:
        print(f"cluster: {reason}", file=sys.stderr)
        return 1
    return 0


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="cluster", description="A throwaway real Kubernetes cluster on this machine.")
    top.add_argument("--name", default="dev", help="of the cluster; at most 8 letters and digits (default: dev)")
    verbs = top.add_subparsers(required=True, metavar="verb")

    build = verbs.add_parser("build", help="build every program into the cache")
    build.add_argument("--kubernetes", default=PINNED.kubernetes, metavar="VERSION")
    build.set_defaults(verb=build_verb)

    up = verbs.add_parser("up", help="start the cluster, building first what is missing")
    up.add_argument("--nodes", type=int, default=2)
    up.add_argument("--kubernetes", default=PINNED.kubernetes, metavar="VERSION")
    up.add_argument("--dns-cache", action="store_true", help="answers of DNS are cached for 30 s")
    up.set_defaults(verb=up_verb)

    down = verbs.add_parser("down", help="end it and remove everything but binaries and images")
    down.add_argument("--purge", action="store_true", help="remove the nodes' images too")
    down.set_defaults(verb=down_verb)

    load = verbs.add_parser("load-image", help="import an image archive into every node")
    load.add_argument("archive", type=Path)
    load.set_defaults(verb=load_image_verb)
    return top


def cluster_of(options: argparse.Namespace) -> ThrowawayCluster:
    return ThrowawayCluster.named(options.name)


def build_verb(options: argparse.Namespace) -> None:
    build_all(cluster_of(options).cache, replace(PINNED, kubernetes=options.kubernetes))


def up_verb(options: argparse.Namespace) -> None:
    cluster = cluster_of(options)
    cluster.up(
        node_count=options.nodes,
        versions=replace(PINNED, kubernetes=options.kubernetes),
        dns_cache=options.dns_cache,
    )
    print(f"export KUBECONFIG={cluster.kubeconfig}")


def down_verb(options: argparse.Namespace) -> None:
    cluster_of(options).down(purge=options.purge)


def load_image_verb(options: argparse.Namespace) -> None:
    cluster_of(options).load_image(options.archive)
