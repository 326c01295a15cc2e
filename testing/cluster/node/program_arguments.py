"""Build the daemons and command lines of the cluster's programs, without I/O."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from testing.cluster.host.cache import Cache
from testing.cluster.host.layout import API_SERVER_PORT, ETCD_PEER_PORT, ETCD_PORT, ClusterLayout, NodeLayout
from testing.cluster.host.processes import Daemon
from testing.cluster.host.versions import ComponentVersions
from testing.cluster.node.pki import AGGREGATOR

NODE_MONITOR_GRACE = "20s"


def build_etcd_daemon(layout: ClusterLayout, folder: Path) -> Daemon:
    """Build etcd's daemon; fsync is disabled, because the data need not survive a crash of the host."""
    client = f"http://{layout.url_host}:{ETCD_PORT}"
    return build_daemon(
        layout,
        "etcd",
        str(folder / "etcd"),
        f"--data-dir={layout.root / 'etcd'}",
        f"--listen-client-urls={client}",
        f"--advertise-client-urls={client}",
        f"--listen-peer-urls=http://{layout.url_host}:{ETCD_PEER_PORT}",
        "--unsafe-no-fsync",
        "--logger=zap",
        "--log-level=warn",
    )


def build_api_server_daemon(layout: ClusterLayout, folder: Path) -> Daemon:
    """Build kube-apiserver's daemon; it connects to kubelets by `InternalIP`, because node names cannot be resolved."""
    pki = layout.pki
    return build_daemon(
        layout,
        "kube-apiserver",
        str(folder / "kube-apiserver"),
        f"--etcd-servers=http://{layout.url_host}:{ETCD_PORT}",
        f"--advertise-address={layout.host_address}",
        f"--bind-address={layout.host_address}",
        f"--secure-port={API_SERVER_PORT}",
        f"--tls-cert-file={pki / 'apiserver.crt'}",
        f"--tls-private-key-file={pki / 'apiserver.key'}",
        f"--client-ca-file={pki / 'ca.crt'}",
        f"--token-auth-file={pki / 'tokens.csv'}",
        f"--kubelet-client-certificate={pki / 'apiserver-kubelet.crt'}",
        f"--kubelet-client-key={pki / 'apiserver-kubelet.key'}",
        "--kubelet-preferred-address-types=InternalIP",
        f"--proxy-client-cert-file={pki / AGGREGATOR}.crt",
        f"--proxy-client-key-file={pki / AGGREGATOR}.key",
        f"--requestheader-client-ca-file={pki / 'ca.crt'}",
        f"--requestheader-allowed-names={AGGREGATOR}",
        "--requestheader-username-headers=X-Remote-User",
        "--requestheader-group-headers=X-Remote-Group",
        "--requestheader-extra-headers-prefix=X-Remote-Extra-",
        "--service-account-issuer=https://kubernetes.default.svc",
        f"--service-account-key-file={pki / 'service-accounts.key'}",
        f"--service-account-signing-key-file={pki / 'service-accounts.key'}",
        f"--service-cluster-ip-range={join(plan.services_network for plan in layout.plans)}",
        "--authorization-mode=Node,RBAC",
        "--enable-admission-plugins=NodeRestriction",
        "--allow-privileged=true",
        "--profiling=false",
        f"--audit-policy-file={layout.root / 'audit.yaml'}",
        f"--audit-log-path={layout.root / 'audit.log'}",
    )


def build_controller_manager_daemon(layout: ClusterLayout, folder: Path) -> Daemon:
    """Build kube-controller-manager's daemon; nodes become NotReady after 20 s instead of 50 s, to speed up tests."""
    pki = layout.pki
    return build_daemon(
        layout,
        "kube-controller-manager",
        str(folder / "kube-controller-manager"),
        f"--kubeconfig={layout.kubeconfig('controllers')}",
        f"--service-account-private-key-file={pki / 'service-accounts.key'}",
        f"--root-ca-file={pki / 'ca.crt'}",
        f"--cluster-signing-cert-file={pki / 'ca.crt'}",
        f"--cluster-signing-key-file={pki / 'ca.key'}",
        "--use-service-account-credentials=true",
        "--allocate-node-cidrs=false",
        f"--node-monitor-grace-period={NODE_MONITOR_GRACE}",
        "--leader-elect=false",
        "--secure-port=0",
    )


def build_scheduler_daemon(layout: ClusterLayout, folder: Path) -> Daemon:
    return build_daemon(
        layout,
        "kube-scheduler",
        str(folder / "kube-scheduler"),
        f"--kubeconfig={layout.kubeconfig('scheduler')}",
        "--leader-elect=false",
        "--secure-port=0",
    )


def build_coredns_daemon(layout: ClusterLayout, folder: Path) -> Daemon:
    return build_daemon(layout, "coredns", str(folder / "coredns"), "-conf", str(layout.corefile))


def build_control_plane_daemons(
    layout: ClusterLayout, cache: Cache, versions: ComponentVersions, *, pod_groups: bool = False
) -> tuple[Daemon, ...]:
    """Return the daemons of the control plane in start order."""
    kubernetes = cache.get_binary_folder("kubernetes", versions.kubernetes)
    gates, api_version = build_pod_group_arguments(versions) if pod_groups else ((), ())
    return (
        build_etcd_daemon(layout, cache.get_binary_folder("etcd", versions.etcd)),
        with_arguments(build_api_server_daemon(layout, kubernetes), *gates, *api_version),
        with_arguments(build_controller_manager_daemon(layout, kubernetes), *gates),
        with_arguments(build_scheduler_daemon(layout, kubernetes), *gates),
        build_coredns_daemon(layout, cache.get_binary_folder("coredns", versions.coredns)),
    )


def build_pod_group_arguments(versions: ComponentVersions) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the arguments that turn on gang scheduling by PodGroups, and those that serve their API."""
    gates = ["GenericWorkload", "TopologyAwareWorkloadScheduling"]
    version = "v1beta1"
    if versions.kubernetes.startswith("1.36."):
        gates, version = [*gates, "GangScheduling"], "v1alpha2"
    return (
        (f"--feature-gates={','.join(f'{gate}=true' for gate in gates)}",),
        (f"--runtime-config=scheduling.k8s.io/{version}=true",),
    )


def with_arguments(daemon: Daemon, *arguments: str) -> Daemon:
    return replace(daemon, argv=(*daemon.argv, *arguments))


def build_containerd_daemon(layout: ClusterLayout, node: NodeLayout, folder: Path) -> Daemon:
    """Build containerd's daemon, with a PATH that contains its shim and runc."""
    path = f"PATH={folder}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    return build_daemon(
        layout,
        get_containerd_name(node),
        *build_nsenter_command(node),
        *("env", path, str(folder / "containerd"), "--config", str(node.root / "containerd.toml")),
        *("--log-level", "warn"),
    )


def get_containerd_name(node: NodeLayout) -> str:
    return f"containerd-{node.name}"


def build_kubelet_daemon(layout: ClusterLayout, node: NodeLayout, folder: Path) -> Daemon:
    return build_daemon(
        layout,
        f"kubelet-{node.name}",
        *build_nsenter_command(node),
        str(folder / "kubelet"),
        f"--config={node.root / 'kubelet.yaml'}",
        f"--kubeconfig={layout.kubeconfig(node.name)}",
        f"--root-dir={node.root / 'kubelet'}",
        f"--cert-dir={node.root / 'pki'}",
        f"--hostname-override={node.name}",
        f"--node-ip={join(node.addresses)}",
    )


def build_kube_proxy_daemon(layout: ClusterLayout, node: NodeLayout, folder: Path) -> Daemon:
    return build_daemon(
        layout,
        f"kube-proxy-{node.name}",
        *build_nsenter_command(node),
        str(folder / "kube-proxy"),
        f"--kubeconfig={layout.kubeconfig('proxy')}",
        f"--hostname-override={node.name}",
        f"--cluster-cidr={join(plan.pods_network for plan in layout.plans)}",
        "--proxy-mode=nftables",
        "--conntrack-max-per-core=0",
    )


def build_node_daemons(
    layout: ClusterLayout, node: NodeLayout, cache: Cache, versions: ComponentVersions
) -> tuple[Daemon, ...]:
    """Return the daemons of a node in start order."""
    kubernetes = cache.get_binary_folder("kubernetes", versions.kubernetes)
    return (
        build_containerd_daemon(layout, node, cache.get_binary_folder("containerd", versions.containerd)),
        build_kubelet_daemon(layout, node, kubernetes),
        build_kube_proxy_daemon(layout, node, kubernetes),
    )


def build_nsenter_command(node: NodeLayout) -> tuple[str, ...]:
    """Return a command prefix that enters the node's network namespace; `ip netns exec` would hide /sys/fs/cgroup."""
    return ("nsenter", f"--net={node.network_namespace_path}")


def build_daemon(layout: ClusterLayout, name: str, *argv: str) -> Daemon:
    return Daemon(name=name, argv=argv, folder=layout.daemons)


def join(values: Iterable[object]) -> str:
    """Join the values of all IP families for a command line, the primary family first."""
    return ",".join(str(value) for value in values)
