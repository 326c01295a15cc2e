"""Inject faults into the throwaway cluster, such as lost nodes, killed ranks, partitions and stale DNS."""

from __future__ import annotations

import os
import shutil
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from testing.cluster.host.cgroups import set_cpu_limit
from testing.cluster.host.commands import HarnessError, run
from testing.cluster.host.layout import NodeLayout
from testing.cluster.host.processes import stop_all, terminate_processes
from testing.cluster.node.config_files import render_corefile
from testing.cluster.node.network import run_in_node
from testing.cluster.node.partition import drop_all, drop_between, remove_drop_tables
from testing.cluster.node.pod_processes import PodProcess, find_processes_of_pod, find_running_container_id
from testing.cluster.state import write_state
from testing.cluster.throwaway import ThrowawayCluster


@dataclass(frozen=True)
class Chaos:
    """Injects faults into a throwaway cluster.

    Each method returns as soon as the fault is in effect and does not wait until Kubernetes detects it.
    """

    cluster: ThrowawayCluster

    def stop_kubelet(self, node: str) -> None:
        """Stop the kubelet of a node; its containers keep running."""
        self.cluster.find_daemon(f"kubelet-{self.find_node(node).name}").stop()

    def start_kubelet(self, node: str) -> None:
        self.cluster.find_daemon(f"kubelet-{self.find_node(node).name}").start()

    def start_kube_proxy(self, node: str) -> None:
        """Start kube-proxy, which exits when the Node of its node is deleted; a DaemonSet would do the same."""
        daemon = self.cluster.find_daemon(f"kube-proxy-{self.find_node(node).name}")
        if daemon.pid() is None:
            daemon.start()

    def partition(self, node: str, *, other_node: str | None = None) -> None:
        """Silently drop all packets of a node, or only those between it and another node."""
        if other_node is None:
            drop_all(self.find_node(node))
        else:
            drop_between(self.find_node(node), self.find_node(other_node))

    def throttle(self, node: str, *, megabits: int) -> None:
        """Limit the bandwidth of packets to a node, in Mbit/s."""
        limit = ("rate", f"{megabits}mbit", "burst", "64kb", "latency", "200ms")
        run("tc", "qdisc", "replace", "dev", self.find_node(node).host_link, "root", "tbf", *limit)

    def remove_throttle(self, node: str) -> None:
        """Remove the limit of `throttle`."""
        run("tc", "qdisc", "delete", "dev", self.find_node(node).host_link, "root")

    def heal(self, node: str) -> None:
        """Remove all partitions created with this node as the first argument."""
        for layout in self.cluster.layout.nodes:
            remove_drop_tables(layout, partitioned_node=self.find_node(node))

    def kill_container(self, namespace: str, pod: str, *, container: str | None = None) -> None:
        """Send SIGKILL to PID 1 of a container; the kernel then kills its other processes."""
        body = self.get_pod(namespace, pod)
        container_id = find_running_container_id(body, container)
        for process in self.find_processes(body):
            if process.container_id == container_id and process.namespace_pid == 1:
                terminate_processes([process.pid], grace_seconds=0)
                return
        raise HarnessError(f"pod {namespace}/{pod}: container {container_id[:12]} has no running process")

    def kill_rank(self, namespace: str, pod: str, *, rank: int, signal_number: int = signal.SIGKILL) -> None:
        """Send a signal to the processes of a global rank."""
        ranks = self.find_rank_processes(namespace, pod)
        if rank not in ranks:
            raise HarnessError(f"pod {namespace}/{pod}: has no rank {rank}; ranks running there: {sorted(ranks)}")
        for process in ranks[rank]:
            os.kill(process.pid, signal_number)

    def find_rank_processes(self, namespace: str, pod: str) -> dict[int, tuple[PodProcess, ...]]:
        """Return the processes of a pod by global rank, including child processes such as data loader workers."""
        by_rank: dict[int, tuple[PodProcess, ...]] = {}
        for process in self.find_processes(self.get_pod(namespace, pod)):
            if process.rank is not None:
                by_rank[process.rank] = (*by_rank.get(process.rank, ()), process)
        return by_rank

    def signal_pod(self, pod: dict[str, Any], signal_number: int) -> None:
        """Send a signal, such as SIGSTOP, to all processes of a pod's containers."""
        for process in self.find_processes(pod):
            if process.name != "pause":
                os.kill(process.pid, signal_number)

    def stop_api_server(self) -> None:
        self.cluster.find_daemon("kube-apiserver").stop(grace_seconds=2)

    def start_api_server(self) -> None:
        self.cluster.find_daemon("kube-apiserver").start()
        self.cluster.wait_until_api_server_is_ready()

    def restart_etcd(self) -> None:
        etcd = self.cluster.find_daemon("etcd")
        etcd.stop(grace_seconds=2)
        etcd.start()
        self.cluster.wait_until_api_server_is_ready()

    def back_up_etcd(self, folder: Path) -> None:
        """Copy the data of etcd, which is stopped meanwhile."""
        etcd = self.cluster.find_daemon("etcd")
        etcd.stop(grace_seconds=5)
        shutil.copytree(self.cluster.layout.root / "etcd", folder)
        etcd.start()
        self.cluster.wait_until_api_server_is_ready()

    def restore_etcd(self, folder: Path) -> None:
        """Replace the data of etcd by a copy, and restart the control plane and the kubelets, as after a disaster."""
        data = self.cluster.layout.root / "etcd"
        etcd, *others = (
            self.cluster.find_daemon(name)
            for name in (
                *("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler"),
                *(f"kubelet-{node.name}" for node in self.cluster.layout.nodes),
            )
        )
        stop_all((etcd, *others), grace_seconds=5)
        shutil.rmtree(data)
        shutil.copytree(folder, data)
        for daemon in (etcd, *others[:1]):
            daemon.start()
        self.cluster.wait_until_api_server_is_ready()
        for daemon in others[1:]:
            daemon.start()

    def limit_cpu(self, node: str, *, cores: float | None) -> None:
        """Limit the total CPU time of a node's containers; None removes the limit."""
        set_cpu_limit(self.find_node(node).cgroup, cores=cores)

    def limit_network(self, node: str, *, kbit_per_second: int | None) -> None:
        """Limit the outgoing bandwidth of a node; None removes the limit."""
        layout = self.find_node(node)
        run_in_node(layout, "tc", "qdisc", "replace", "dev", "eth0", "root", "pfifo")
        if kbit_per_second is not None:
            rate = ("rate", f"{kbit_per_second}kbit", "burst", "32kbit", "latency", "400ms")
            run_in_node(layout, "tc", "qdisc", "replace", "dev", "eth0", "root", "tbf", *rate)

    def set_dns_cache(self, enabled: bool) -> None:
        """Enable or disable DNS caching (30 s, including negative answers) and empty the cache."""
        cluster = self.cluster
        write_state(cluster.root, cluster.state.with_dns_cache(enabled))
        cluster.layout.corefile.write_text(render_corefile(cluster.layout, cache_answers=enabled))
        dns = cluster.find_daemon("coredns")
        dns.stop()
        dns.start()
        cluster.wait_until_dns_is_ready()

    def find_node(self, name: str) -> NodeLayout:
        nodes = {node.name: node for node in self.cluster.layout.nodes}
        if name not in nodes:
            raise HarnessError(f"cluster {self.cluster.name} has no node {name}; it has {', '.join(nodes)}")
        return nodes[name]

    def get_pod(self, namespace: str, pod: str) -> dict[str, Any]:
        return self.cluster.kubectl.get("pod", pod, namespace=namespace)

    def find_processes(self, pod: dict[str, Any]) -> tuple[PodProcess, ...]:
        node = self.find_node(pod["spec"].get("nodeName", "(not scheduled)"))
        return find_processes_of_pod(node.cgroup, pod["metadata"]["uid"])
