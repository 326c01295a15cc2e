"""Render the configuration files of the cluster's programs, without I/O."""

from __future__ import annotations

import json
from pathlib import Path

from testing.cluster.host.layout import DNS_READY_PORT, ClusterLayout, NodeLayout
from testing.cluster.node.pki import list_users

PAUSE_IMAGE = "localhost/pause:1"
CNI_PLUGINS = "/usr/lib/cni"
AUDIT_POLICY = {  # one record for each request of an operator
    "apiVersion": "audit.k8s.io/v1",
    "kind": "Policy",
    "omitStages": ["RequestReceived"],
    "rules": [{"level": "Metadata", "userGroups": ["system:serviceaccounts:finetune-system"]}, {"level": "None"}],
}


def render_files(layout: ClusterLayout) -> dict[Path, str]:
    """Return all configuration files except the Corefile, which fault injection may have changed."""
    files = {
        layout.kubeconfig(user.name): render_kubeconfig(
            server=layout.api_server, ca_file=layout.pki / "ca.crt", token=user.token, context=layout.device_prefix
        )
        for user in list_users(layout)
    }
    files[layout.root / "audit.yaml"] = format_json(AUDIT_POLICY)
    for node in layout.nodes:
        files[node.root / "cni" / "10-bridge.conflist"] = render_cni_config(node)
        files[node.root / "kubelet.yaml"] = render_kubelet_config(layout, node)
    return files


def render_kubeconfig(*, server: str, ca_file: Path, token: str, context: str) -> str:
    return format_json(
        {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": context, "cluster": {"server": server, "certificate-authority": str(ca_file)}}],
            "users": [{"name": context, "user": {"token": token}}],
            "contexts": [{"name": context, "context": {"cluster": context, "user": context}}],
            "current-context": context,
        }
    )


def render_corefile(layout: ClusterLayout, *, cache_answers: bool) -> str:
    """Render the Corefile; if `cache_answers`, CoreDNS caches answers, including negative ones, for 30 s."""
    return f"""\
.:53 {{
  bind {layout.host_address}
  errors
  ready {layout.url_host}:{DNS_READY_PORT}
  {"cache 30" if cache_answers else ""}
  kubernetes cluster.local in-addr.arpa ip6.arpa {{
    kubeconfig {layout.kubeconfig("dns")} {layout.device_prefix}
    pods insecure
    ttl {30 if cache_answers else 5}
  }}
}}
"""


def render_cni_config(node: NodeLayout) -> str:
    ipam = {
        "type": "host-local",
        "dataDir": str(node.root / "ipam"),
        "ranges": [[{"subnet": str(network)}] for network in node.pod_networks],
        "routes": [{"dst": plan.all_addresses} for plan in node.plans],
    }
    bridge = {
        "type": "bridge",
        "bridge": "cni0",
        "isGateway": True,
        "ipMasq": True,
        "hairpinMode": True,
        "ipam": ipam,
    }
    ports = {"type": "portmap", "capabilities": {"portMappings": True}}
    return format_json({"cniVersion": "1.0.0", "name": node.network_namespace, "plugins": [bridge, ports]})


def render_containerd_config(node: NodeLayout, *, restrict_oom_score: bool) -> str:
    """Render containerd's configuration.

    Without CAP_SYS_RESOURCE, containers start only if `restrict_oom_score` is set. NRI is disabled because its
    socket path is fixed and each node runs a containerd; for the same reason network namespaces of pods are
    stored in the node's folder.
    """
    return f"""\
version = 3
root = "{node.containerd_root}"
state = "{node.containerd_state}"
disabled_plugins = ["io.containerd.nri.v1.nri"]
[grpc]
  address = "{node.containerd_socket}"
[plugins.'io.containerd.internal.v1.opt']
  path = "{node.root / "opt"}"
[plugins.'io.containerd.cri.v1.images']
  snapshotter = "overlayfs"
  [plugins.'io.containerd.cri.v1.images'.pinned_images]
    sandbox = "{PAUSE_IMAGE}"
[plugins.'io.containerd.cri.v1.runtime']
  restrict_oom_score_adj = {"true" if restrict_oom_score else "false"}
  netns_mounts_under_state_dir = true
  [plugins.'io.containerd.cri.v1.runtime'.cni]
    bin_dirs = ["{CNI_PLUGINS}"]
    conf_dir = "{node.root / "cni"}"
  [plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc]
    runtime_type = "io.containerd.runc.v2"
    [plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc.options]
      SystemdCgroup = false
"""


def render_kubelet_config(layout: ClusterLayout, node: NodeLayout) -> str:
    return format_json(
        {
            "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "kind": "KubeletConfiguration",
            "address": "::" if any(plan.is_ipv6 for plan in layout.plans) else "0.0.0.0",
            "authentication": {
                "anonymous": {"enabled": False},
                "webhook": {"enabled": True},
                "x509": {"clientCAFile": str(layout.pki / "ca.crt")},
            },
            "authorization": {"mode": "Webhook"},
            "cgroupDriver": "cgroupfs",
            "cgroupRoot": f"/{node.cgroup}",
            "failCgroupV1": False,
            "failSwapOn": False,
            "clusterDNS": [str(layout.host_address)],
            "clusterDomain": "cluster.local",
            "resolvConf": "",
            "containerRuntimeEndpoint": f"unix://{node.containerd_socket}",
            "evictionHard": {"memory.available": "100Mi", "nodefs.available": "1%", "imagefs.available": "1%"},
            "imageGCHighThresholdPercent": 100,
            "volumePluginDir": str(node.root / "plugins"),
            "podLogsDir": str(node.root / "podlogs"),
        }
    )


def format_json(value: object) -> str:
    """Format a value as JSON, which is valid YAML and needs no library."""
    return json.dumps(value, indent=2) + "\n"
