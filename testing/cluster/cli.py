"""Command line of the throwaway cluster: `python -m testing.cluster COMMAND`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias

from testing.cluster.fault_injection import Chaos
from testing.cluster.host.addresses import IpFamily
from testing.cluster.host.commands import HarnessError
from testing.cluster.host.versions import PINNED
from testing.cluster.images.go_build import build_all, pin_versions
from testing.cluster.images.project_images import TARGETS, ImageBuilder
from testing.cluster.kwok import start_kwok, stop_kwok
from testing.cluster.provider import ThrowawayProvider
from testing.cluster.throwaway import DEFAULT_NAME, ThrowawayCluster


def main(arguments: list[str] | None = None) -> int:
    options = build_parser().parse_args(arguments)
    try:
        cluster = ThrowawayCluster.from_name(options.name)
        if options.command in SETUP_COMMANDS:
            SETUP_COMMANDS[options.command](cluster, options)
        else:
            CHAOS_COMMANDS[options.command](Chaos(cluster), options)
    except (HarnessError, ValueError) as error:
        print(f"cluster: {error}", file=sys.stderr)
        return 1
    return 0


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="cluster", description="Run a disposable real Kubernetes cluster on this host."
    )
    parser.add_argument(
        "--name", default=DEFAULT_NAME, help="name of the cluster, at most 8 letters and digits (default: dev)"
    )
    subparsers = parser.add_subparsers(required=True, metavar="verb", dest="command")
    add_setup_commands(subparsers)
    add_chaos_commands(subparsers)
    return parser


Subparsers: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def add_setup_commands(subparsers: Subparsers) -> None:
    build = subparsers.add_parser("build", help="build all programs into the cache")
    build.add_argument("--kubernetes", default=PINNED.kubernetes, metavar="VERSION")
    subparsers.add_parser("pin", help="regenerate go.mod and go.sum after a change of versions.py")
    up = subparsers.add_parser("up", help="start the cluster; missing programs are built first")
    up.add_argument("--nodes", type=int, default=2)
    up.add_argument("--kubernetes", default=PINNED.kubernetes, metavar="VERSION")
    up.add_argument(
        "--ip-family", type=IpFamily, choices=tuple(IpFamily), default=IpFamily.IPV4, help="(default: ipv4)"
    )
    up.add_argument("--dns-cache", action="store_true", help="let CoreDNS cache answers for 30 s")
    down = subparsers.add_parser("down", help="stop the cluster and remove everything except binaries and images")
    down.add_argument("--purge", action="store_true", help="also remove the images of the nodes")
    images = subparsers.add_parser("build-image", help="build images of this checkout and print their paths")
    images.add_argument("target", nargs="+", choices=TARGETS)
    load = subparsers.add_parser("load-image", help="import an image archive (or OCI layout) into every node")
    load.add_argument("archive", type=Path)
    claim = subparsers.add_parser("shared-claim", help="create a ReadWriteMany claim and print its folder on this host")
    claim.add_argument("claim")
    claim.add_argument("--namespace", default="default")
    kwok = subparsers.add_parser("kwok", help="start or stop fake nodes, for load tests without containers")
    kwok.add_argument("state", choices=("up", "down"))
    kwok.add_argument("--nodes", type=int, default=20)


def add_chaos_commands(subparsers: Subparsers) -> None:
    for name, help_text in (
        ("stop-kubelet", "stop the kubelet of a node; its containers keep running"),
        ("start-kubelet", "start the kubelet of a node again"),
        ("heal", "remove the network partitions of a node"),
    ):
        subparsers.add_parser(name, help=help_text).add_argument("node")
    partition = subparsers.add_parser("partition", help="drop all packets of a node, or only those between two nodes")
    partition.add_argument("node")
    partition.add_argument("--from", dest="other_node", metavar="NODE")
    container = subparsers.add_parser("kill-container", help="send SIGKILL to the first process of a container")
    container.add_argument("pod")
    container.add_argument("--container")
    container.add_argument("--namespace", default="default")
    rank = subparsers.add_parser("kill-rank", help="send SIGKILL to one rank of a pod")
    rank.add_argument("pod")
    rank.add_argument("rank", type=int)
    rank.add_argument("--namespace", default="default")
    limit = subparsers.add_parser(
        "throttle", help="limit CPU and network of a node; limits that are not given are removed"
    )
    limit.add_argument("node")
    limit.add_argument("--cores", type=float)
    limit.add_argument("--kbit", type=int)
    for name in ("stop-api-server", "start-api-server", "restart-etcd"):
        subparsers.add_parser(name)
    dns = subparsers.add_parser("dns-cache", help="turn the DNS cache (30 s, negative answers too) on or off")
    dns.add_argument("state", choices=("on", "off"))


def up(cluster: ThrowawayCluster, options: argparse.Namespace) -> None:
    cluster.up(
        node_count=options.nodes,
        versions=replace(PINNED, kubernetes=options.kubernetes),
        ip_family=options.ip_family,
        dns_cache=options.dns_cache,
    )
    print(f"export KUBECONFIG={cluster.kubeconfig}")


def create_shared_claim(cluster: ThrowawayCluster, options: argparse.Namespace) -> None:
    provider = ThrowawayProvider(cluster)
    cluster.kubectl.apply(*provider.build_shared_claim_objects(options.namespace, options.claim))
    print(provider.get_shared_folder(options.namespace, options.claim))


def start_or_stop_kwok(cluster: ThrowawayCluster, options: argparse.Namespace) -> None:
    if options.state == "up":
        start_kwok(cluster, options.nodes)
    else:
        stop_kwok(cluster)


def build_images(cluster: ThrowawayCluster, options: argparse.Namespace) -> None:
    for target in options.target:
        print(ImageBuilder(cluster.cache).build(target))


def throttle(chaos: Chaos, options: argparse.Namespace) -> None:
    chaos.limit_cpu(options.node, cores=options.cores)
    chaos.limit_network(options.node, kbit_per_second=options.kbit)


SETUP_COMMANDS: dict[str, Callable[[ThrowawayCluster, argparse.Namespace], object]] = {
    "build": lambda cluster, options: build_all(cluster.cache, replace(PINNED, kubernetes=options.kubernetes)),
    "pin": lambda cluster, _options: pin_versions(cluster.cache),
    "up": up,
    "down": lambda cluster, options: cluster.down(purge=options.purge),
    "build-image": build_images,
    "load-image": lambda cluster, options: cluster.load_image(options.archive),
    "shared-claim": create_shared_claim,
    "kwok": start_or_stop_kwok,
}
CHAOS_COMMANDS: dict[str, Callable[[Chaos, argparse.Namespace], object]] = {
    "stop-kubelet": lambda chaos, options: chaos.stop_kubelet(options.node),
    "start-kubelet": lambda chaos, options: chaos.start_kubelet(options.node),
    "partition": lambda chaos, options: chaos.partition(options.node, other_node=options.other_node),
    "heal": lambda chaos, options: chaos.heal(options.node),
    "kill-container": lambda chaos, options: chaos.kill_container(
        options.namespace, options.pod, container=options.container
    ),
    "kill-rank": lambda chaos, options: chaos.kill_rank(options.namespace, options.pod, rank=options.rank),
    "throttle": throttle,
    "stop-api-server": lambda chaos, _options: chaos.stop_api_server(),
    "start-api-server": lambda chaos, _options: chaos.start_api_server(),
    "restart-etcd": lambda chaos, _options: chaos.restart_etcd(),
    "dns-cache": lambda chaos, options: chaos.set_dns_cache(options.state == "on"),
}
