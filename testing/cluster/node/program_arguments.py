"""Command lines of the cluster's programs, computed without I/O."""

from __future__ import annotations

from pathlib import Path

from testing.cluster.host.cache import Cache
from testing.cluster.host.layout import API_SERVER_PORT, ETCD_PEER_PORT, ETCD_PORT, Layout, NodeLayout
from testing.cluster.host.processes import Daemon
from testing.cluster.host.versions import Versions

NODE_MONITOR_GRACE = "20s"


def etcd(layout: Layout, folder: Path) -> Daemon:
    """etcd without fsync: its data need not survive a crash of the host."""
    client = f"http://{layout.host_address}:{ETCD_PORT}"
    return daemon(
        layout,
        "etcd",
        str(folder / "etcd"),
        f"--data-dir={layout.root / 'etcd'}",
        f"--listen-client-urls={client}",
        f"--advertise-client-urls={client}",
        f"--listen-peer-urls=http://{layout.host_address}:{ETCD_PEER_PORT}",
        "--unsafe-no-fsync",
        "--logger=zap",
        "--log-level=warn",
    )


def api_server(layout: Layout, folder: Path) -> Daemon:
    """kube-apiserver; it prefers `InternalIP`, because `kubectl logs` cannot resolve the names of nodes."""
    pki = layout.pki
    return daemon(
        layout,
        "kube-apiserver",
        str(folder / "kube-apiserver"),
        f"--etcd-servers=http://{layout.host_address}:{ETCD_PORT}",
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
        "--service-account-issuer=https://kubernetes.default.svc",
        f"--service-account-key-file={pki / 'service-accounts.key'}",
        f"--service-account-signing-key-file={pki / 'service-accounts.key'}",
        f"--service-cluster-ip-range={layout.services_network}",
        "--authorization-mode=Node,RBAC",
        "--enable-admission-plugins=NodeRestriction",
        "--allow-privileged=true",
        "--profiling=false",
    )


def controller_manager(layout: Layout, folder: Path) -> Daemon:
    """kube-controller-manager; nodes become NotReady after 20 s instead of 50 s, which shortens tests."""
    pki = layout.pki
    return daemon(
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


def scheduler(layout: Layout, folder: Path) -> Daemon:
    return daemon(
        layout,
        "kube-scheduler",
        str(folder / "kube-scheduler"),
        f"--kubeconfig={layout.kubeconfig('scheduler')}",
        "--leader-elect=false",
        "--secure-port=0",
    )


def coredns(layout: Layout, folder: Path) -> Daemon:
    return daemon(layout, "coredns", str(folder / "coredns"), "-conf", str(layout.corefile))


def control_plane(layout: Layout, cache: Cache, versions: Versions) -> tuple[Daemon, ...]:
    """Return the daemons of the control plane in start order."""
    kubernetes = cache.binaries("kubernetes", versions.kubernetes)
    return (
        etcd(layout, cache.binaries("etcd", versions.etcd)),
        api_server(layout, kubernetes),
        controller_manager(layout, kubernetes),
        scheduler(layout, kubernetes),
        coredns(layout, cache.binaries("coredns", versions.coredns)),
    )


def containerd(layout: Layout, node: NodeLayout, folder: Path) -> Daemon:
    """containerd, with a PATH on which it finds its shim and runc."""
    path = f"PATH={folder}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    return daemon(
        layout,
        containerd_name(node),
        *nsenter_command(node),
        *("env", path, str(folder / "containerd"), "--config", str(node.root / "containerd.toml")),
        *("--log-level", "warn"),
    )


def containerd_name(node: NodeLayout) -> str:
    return f"containerd-{node.name}"


def kubelet(layout: Layout, node: NodeLayout, folder: Path) -> Daemon:
    return daemon(
        layout,
        f"kubelet-{node.name}",
        *nsenter_command(node),
        str(folder / "kubelet"),
        f"--config={node.root / 'kubelet.yaml'}",
        f"--kubeconfig={layout.kubeconfig(node.name)}",
        f"--root-dir={node.root / 'kubelet'}",
        f"--cert-dir={node.root / 'pki'}",
        f"--hostname-override={node.name}",
        f"--node-ip={node.address}",
    )


def kube_proxy(layout: Layout, node: NodeLayout, folder: Path) -> Daemon:
    return daemon(
        layout,
        f"kube-proxy-{node.name}",
        *nsenter_command(node),
        str(folder / "kube-proxy"),
        f"--kubeconfig={layout.kubeconfig('proxy')}",
        f"--hostname-override={node.name}",
        f"--cluster-cidr={layout.pods_network}",
        "--proxy-mode=nftables",
        "--conntrack-max-per-core=0",
    )


def node_programs(layout: Layout, node: NodeLayout, cache: Cache, versions: Versions) -> tuple[Daemon, ...]:
    """Return the daemons of a node in start order."""
    kubernetes = cache.binaries("kubernetes", versions.kubernetes)
    return (
        containerd(layout, node, cache.binaries("containerd", versions.containerd)),
        kubelet(layout, node, kubernetes),
        kube_proxy(layout, node, kubernetes),
    )


def nsenter_command(node: NodeLayout) -> tuple[str, ...]:
    """Return a command prefix that enters the node's network namespace; `ip netns exec` would hide /sys/fs/cgroup."""
    return ("nsenter", f"--net={node.network_namespace_path}")


def daemon(layout: Layout, name: str, *argv: str) -> Daemon:
    return Daemon(name=name, argv=argv, folder=layout.daemons)
