"""Throwaway Kubernetes cluster that runs as plain processes on one host."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path

from testing.cluster.host.addresses import IpFamily
from testing.cluster.host.cache import Cache
from testing.cluster.host.cgroups import list_cgroups_with_prefix
from testing.cluster.host.commands import HarnessError, stage
from testing.cluster.host.debian_packages import RUNTIME, ensure_packages
from testing.cluster.host.layout import DNS_READY_PORT, MAX_NODES, ClusterLayout, check_name, choose_network
from testing.cluster.host.preflight import require_free_ports, require_supported_host
from testing.cluster.host.processes import Daemon, find_daemons, stop_all
from testing.cluster.host.versions import PINNED, ComponentVersions
from testing.cluster.images.go_build import build_all
from testing.cluster.images.image_loading import build_pause_archive, load_into_nodes
from testing.cluster.kubectl import Kubectl, is_healthy, wait_for_api_server
from testing.cluster.node import nodes, program_arguments
from testing.cluster.node.config_files import render_corefile, render_files
from testing.cluster.node.network import (
    ensure_network,
    list_host_routes,
    list_network_links,
    list_network_namespaces,
    remove_network,
)
from testing.cluster.node.partition import list_host_drop_tables, remove_host_drop_tables
from testing.cluster.node.pki import ensure_certificates, list_users
from testing.cluster.state import ClusterState, read_state, require_state, write_state

DEFAULT_NAME = "dev"
REQUIRED_COMPONENTS = ("kubernetes", "etcd", "coredns", "pause", "containerd")


@dataclass(frozen=True)
class ThrowawayCluster:
    """A named throwaway cluster; its state is in the cache folder."""

    name: str
    cache: Cache

    @classmethod
    def from_name(cls, name: str = DEFAULT_NAME) -> ThrowawayCluster:
        try:
            return cls(name=check_name(name), cache=Cache.from_environment())
        except ValueError as error:
            raise HarnessError(str(error)) from error

    @property
    def root(self) -> Path:
        return self.cache.get_cluster_folder(self.name)

    @property
    def state(self) -> ClusterState:
        return require_state(self.root)

    @property
    def layout(self) -> ClusterLayout:
        return self.state.layout(self.root)

    @property
    def kubeconfig(self) -> Path:
        return self.layout.kubeconfig("admin")

    @property
    def kubectl(self) -> Kubectl:
        program = self.cache.get_binary_folder("kubernetes", self.state.versions.kubernetes) / "kubectl"
        return Kubectl(program=program, kubeconfig=self.kubeconfig)

    def up(
        self,
        *,
        node_count: int = 2,
        versions: ComponentVersions = PINNED,
        ip_family: IpFamily = IpFamily.IPV4,
        dns_cache: bool = False,
        pod_groups: bool = False,
    ) -> None:
        """Start the cluster if it is not running; recreate it after a reboot of the host."""
        if not 1 <= node_count <= MAX_NODES:
            raise HarnessError(f"{node_count} nodes: expected 1 to {MAX_NODES}")
        require_supported_host(self.cache, self.root)
        ensure_packages(RUNTIME)
        build_all(self.cache, versions, component_names=REQUIRED_COMPONENTS)
        with self.cache.hold_lock("cluster"), stage(f"cluster {self.name} up with {node_count} nodes"):
            requested = ClusterState(
                self.name,
                node_count,
                "",
                versions,
                dns_cache=dns_cache,
                ip_family=ip_family,
                pod_groups=pod_groups,
            )
            self.start(self.prepare_state(requested))

    def prepare_state(self, requested: ClusterState) -> ClusterState:
        """Return the state of the running cluster, or the requested state with a network that is free on the host.

        Raises:
            HarnessError: the running cluster differs from the requested one.
        """
        previous_state = read_state(self.root)
        if previous_state is not None and self.list_running_daemons():
            if previous_state.description != requested.description:
                raise HarnessError(
                    f"cluster {self.name} is up with {previous_state.description}, requested {requested.description}; "
                    "run `down` first"
                )
            return previous_state
        if previous_state is not None:
            self.remove(previous_state, keep_images=True)
        state = replace(requested, network=str(choose_network(self.name, list_host_routes())))
        write_state(self.root, state)
        return state

    def start(self, state: ClusterState) -> None:
        layout = state.layout(self.root)
        is_new = not self.list_running_daemons()
        ensure_network(layout)
        if is_new:
            require_free_ports(layout)
        ensure_certificates(layout)
        for path, text in render_files(layout).items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        layout.corefile.write_text(render_corefile(layout, cache_answers=state.dns_cache))
        layout.shared_root.mkdir(exist_ok=True)
        etcd, api_server, *control_plane_daemons = program_arguments.build_control_plane_daemons(
            layout, self.cache, state.versions, pod_groups=state.pod_groups
        )
        etcd.start()
        api_server.start()
        node_daemons = []
        for node in layout.nodes:
            nodes.prepare_node(node)
            containerd, *other_daemons = program_arguments.build_node_daemons(layout, node, self.cache, state.versions)
            containerd.start()
            node_daemons += other_daemons
        self.wait_until_api_server_is_ready()
        for daemon in (*control_plane_daemons, *node_daemons):
            daemon.start()
        load_into_nodes(self.cache, state.versions, layout, build_pause_archive(self.cache))
        self.wait_until_ready()
        self.wait_until_dns_is_ready()

    def daemons(self) -> tuple[Daemon, ...]:
        state, layout = self.state, self.layout
        return (
            *program_arguments.build_control_plane_daemons(
                layout, self.cache, state.versions, pod_groups=state.pod_groups
            ),
            *(
                d
                for node in layout.nodes
                for d in program_arguments.build_node_daemons(layout, node, self.cache, state.versions)
            ),
        )

    def find_daemon(self, name: str) -> Daemon:
        daemons = {daemon.name: daemon for daemon in self.daemons()}
        if name not in daemons:
            raise HarnessError(f"cluster {self.name} has no program {name}; it has {', '.join(daemons)}")
        return daemons[name]

    def list_running_daemons(self) -> tuple[str, ...]:
        return tuple(daemon.name for daemon in self.daemons() if daemon.pid() is not None)

    def wait_until_api_server_is_ready(self) -> None:
        layout = self.layout
        admin = next(user for user in list_users(layout) if user.name == "admin")
        try:
            wait_for_api_server(layout.api_server, ca_file=layout.pki / "ca.crt", token=admin.token)
        except HarnessError:
            for daemon in self.daemons()[:2]:
                daemon.require_running()
            raise

    def wait_until_dns_is_ready(self, *, timeout_seconds: float = 20) -> None:
        deadline = time.monotonic() + timeout_seconds
        while not is_healthy(f"http://{self.layout.url_host}:{DNS_READY_PORT}/ready"):
            self.find_daemon("coredns").require_running()
            if time.monotonic() > deadline:
                raise HarnessError(f"CoreDNS is not ready; see {self.find_daemon('coredns').log}")
            time.sleep(0.05)

    def wait_until_ready(self, *, timeout_seconds: int = 90) -> None:
        node_names = {node.name for node in self.layout.nodes}
        deadline = time.monotonic() + timeout_seconds
        # All kubelets share the device plugin socket. A kubelet exits if another one creates it at the same moment.
        restartable = {f"kubelet-{name}" for name in node_names}
        # without the default ServiceAccount, which a controller creates, pods are rejected
        while not (
            node_names <= self.kubectl.list_ready_nodes() and self.kubectl.succeeds("get", "serviceaccount", "default")
        ):
            for daemon in self.daemons():
                if daemon.pid() is None and daemon.name in restartable:
                    restartable.remove(daemon.name)
                    daemon.start()
                daemon.require_running()
            if time.monotonic() > deadline:
                missing = sorted(node_names - self.kubectl.list_ready_nodes()) or ["the default ServiceAccount"]
                raise HarnessError(
                    f"{', '.join(missing)} not ready within {timeout_seconds} s; logs are in {self.layout.daemons}"
                )
            time.sleep(0.2)

    def load_image(self, archive: Path) -> None:
        with stage(f"load {archive.name} into {self.state.node_count} nodes"):
            load_into_nodes(self.cache, self.state.versions, self.layout, archive)

    def down(self, *, purge: bool = False) -> None:
        """Stop the cluster and remove its processes, namespaces, mounts and cgroups; keep images unless `purge`."""
        with self.cache.hold_lock("cluster"), stage(f"cluster {self.name} down"):
            state = read_state(self.root)
            if state is not None:
                self.remove(state, keep_images=not purge)
            elif self.root.exists() and purge:
                self.remove(ClusterState(self.name, MAX_NODES, "10.80.0.0/16", PINNED), keep_images=False)

    def remove(self, state: ClusterState, *, keep_images: bool) -> None:
        """Stop all processes and remove all files.

        The kubelets stop first, because they would restart terminated containers; containerd stops last, because
        removing the container records requires it.
        """
        layout = state.layout(self.root)
        daemons = find_daemons(layout.daemons)
        runtimes = {program_arguments.get_containerd_name(node): node for node in layout.nodes}
        sockets = nodes.find_shim_sockets(layout)
        stop_all((d for d in daemons if d.name not in runtimes), grace_seconds=2)
        nodes.kill_containers(layout)
        for daemon in daemons:
            if daemon.name in runtimes and daemon.pid() is not None:
                nodes.remove_container_records(self.cache, state.versions, runtimes[daemon.name])
        stop_all(daemons, grace_seconds=5)
        nodes.kill_leftover_processes(layout)
        for socket in sockets:
            socket.unlink(missing_ok=True)
        nodes.unmount_below(layout.root)
        remove_host_drop_tables(layout)
        remove_network(layout)
        nodes.remove_node_cgroups(layout)
        nodes.remove_files_outside_root(layout)
        nodes.remove_files(layout, keep_images=keep_images)

    def find_leftovers(self) -> tuple[str, ...]:
        """Return a description of each resource that `down` failed to remove."""
        layout = ClusterLayout(self.name, self.root, MAX_NODES, choose_network(self.name, ()))
        return (
            *(f"network namespace {name}" for name in list_network_namespaces(layout)),
            *(f"network link {name}" for name in list_network_links(layout)),
            *(f"packet filter {name}" for name in list_host_drop_tables(layout)),
            *(f"mount {path}" for path in nodes.list_mounts_below(self.root)),
            *(f"cgroup {name}" for name in list_cgroups_with_prefix(layout.device_prefix)),
            *(f"CNI result {path}" for path in nodes.find_cni_results(layout)),
            *(f"process {line}" for line in nodes.find_processes_with_path(self.root)),
        )
