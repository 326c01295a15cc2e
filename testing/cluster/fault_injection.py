"""What goes wrong in a cluster, on purpose: lost nodes, killed ranks, partitions, outages, slowness, stale DNS."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from typing import Any

from testing.cluster.host.cgroups import set_cpu_limit
from testing.cluster.host.commands import ClusterError
from testing.cluster.host.layout import NodeLayout
from testing.cluster.host.processes import end_processes
from testing.cluster.node.config_files import render_corefile
from testing.cluster.node.network import in_node
from testing.cluster.node.partition import drop_all, drop_between, forget_drops
from testing.cluster.node.pod_processes import PodProcess, container_id_of, processes_of_pod
from testing.cluster.state import write_state
from testing.cluster.throwaway import ThrowawayCluster


@dataclass(frozen=True)
class Chaos:
    """Every verb returns when the fault is in force; none of them waits for Kubernetes to notice."""

    cluster: ThrowawayCluster

    def stop_kubelet(self, node: str) -> None:
        """The node's containers run on: only Kubernetes loses sight of them."""
        self.cluster.daemon(f"kubelet-{self.node(node).name}").stop()

    def start_kubelet(self, node: str) -> None:
        self.cluster.daemon(f"kubelet-{self.node(node).name}").start()

    def partition(self, node: str, *, away_from: str | None = None) -> None:
        """Drop without a sound all packets between a node and everything else, or only another node."""
        if away_from is None:
            drop_all(self.node(node))
        else:
            drop_between(self.node(node), self.node(away_from))

    def heal(self, node: str) -> None:
        """Ends every partition that the node was named in first."""
        for layout in self.cluster.layout.nodes:
            forget_drops(layout, because_of=self.node(node))

    def kill_container(self, namespace: str, pod: str, *, container: str | None = None) -> None:
        """SIGKILL to its first process; the kernel ends the others with it."""
        body = self.pod(namespace, pod)
        wanted = container_id_of(body, container)
        for process in self.processes(body):
            if process.container_id == wanted and process.namespace_pid == 1:
                end_processes([process.pid], patience_seconds=0)
                return
        raise ClusterError(f"pod {namespace}/{pod}: container {wanted[:12]} has no process any more")

    def kill_rank(self, namespace: str, pod: str, *, rank: int, signal_number: int = signal.SIGKILL) -> None:
        """A signal to the process whose RANK (over the whole job) it is."""
        ranks = self.ranks(namespace, pod)
        if rank not in ranks:
            raise ClusterError(f"pod {namespace}/{pod}: has no rank {rank}; ranks running there: {sorted(ranks)}")
        for process in ranks[rank]:
            os.kill(process.pid, signal_number)

    def ranks(self, namespace: str, pod: str) -> dict[int, tuple[PodProcess, ...]]:
        """Processes by RANK; children of a rank (data loaders) are told by it too."""
        found: dict[int, tuple[PodProcess, ...]] = {}
        for process in self.processes(self.pod(namespace, pod)):
            if process.rank is not None:
                found[process.rank] = (*found.get(process.rank, ()), process)
        return found

    def stop_api_server(self) -> None:
        self.cluster.daemon("kube-apiserver").stop(patience_seconds=2)

    def start_api_server(self) -> None:
        self.cluster.daemon("kube-apiserver").start()
        self.cluster.wait_until_api_server_is_ready()

    def restart_etcd(self) -> None:
        etcd = self.cluster.daemon("etcd")
        etcd.stop(patience_seconds=2)
        etcd.start()
        self.cluster.wait_until_api_server_is_ready()

    def limit_cpu(self, node: str, *, cores: float | None) -> None:
        """Of all containers on the node together; None lifts the limit."""
        set_cpu_limit(self.node(node).cgroup, cores=cores)

    def limit_network(self, node: str, *, kbit_per_second: int | None) -> None:
        """Of what the node sends; None lifts the limit."""
        layout = self.node(node)
        in_node(layout, "tc", "qdisc", "replace", "dev", "eth0", "root", "pfifo")
        if kbit_per_second is not None:
            rate = ("rate", f"{kbit_per_second}kbit", "burst", "32kbit", "latency", "400ms")
            in_node(layout, "tc", "qdisc", "replace", "dev", "eth0", "root", "tbf", *rate)

    def set_dns_cache(self, cached: bool) -> None:
        """Cached answers, and cached denials, for 30 s; a switch begins with an empty cache."""
        cluster = self.cluster
        write_state(cluster.root, cluster.state.with_dns_cache(cached))
        cluster.layout.corefile.write_text(render_corefile(cluster.layout, cached=cached))
        dns = cluster.daemon("coredns")
        dns.stop()
        dns.start()
        cluster.wait_until_dns_answers()

    def node(self, name: str) -> NodeLayout:
        known = {node.name: node for node in self.cluster.layout.nodes}
        if name not in known:
            raise ClusterError(f"cluster {self.cluster.name} has no node {name}; it has {', '.join(known)}")
        return known[name]

    def pod(self, namespace: str, pod: str) -> dict[str, Any]:
        return self.cluster.kubectl.get("pod", pod, namespace=namespace)

    def processes(self, pod: dict[str, Any]) -> tuple[PodProcess, ...]:
        node = self.node(pod["spec"].get("nodeName", "(not scheduled)"))
        return processes_of_pod(node.cgroup, pod["metadata"]["uid"])
