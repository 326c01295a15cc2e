"""Runs controller managers of other projects, such as Kueue, on the throwaway cluster.

They are built from their Go modules and use the upstream manifests, CRDs, certificates, webhooks and configuration,
except that they run as host processes instead of pods, without leader election.
"""

from __future__ import annotations

import base64
import json
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from testing.cluster.host.commands import HarnessError, run, stage
from testing.cluster.host.processes import Daemon
from testing.cluster.images.go_build import require_go
from testing.cluster.kubectl import is_healthy
from testing.cluster.throwaway import ThrowawayCluster

CERTIFICATE_FOLDER = Path("/tmp/k8s-webhook-server")  # default certificate folder of all managers
API_CERTIFICATE_FOLDER = Path("/visibility")  # where Kueue creates the certificate of its API
CONFIGURATION_FILE = "controller_manager_config.yaml"
TIMEOUT_SECONDS = 120

RawBody = dict[str, Any]


@dataclass(frozen=True)
class ControllerManager:
    """A controller manager to build and install.

    package: main package in the Go module. manifests: kustomize folder in the Go module. config_map: ConfigMap with the
    configuration file. webhook_port: port on the host; the next ports serve
    the health probes and the API.
    """

    name: str
    version: str
    module: str
    package: str
    manifests: str
    namespace: str
    secret: str
    config_map: str
    webhook_port: int
    arguments: tuple[str, ...] = ()
    serves_api: bool = False  # whether the API server forwards requests of an APIService to it

    @property
    def health_port(self) -> int:
        return self.webhook_port + 1

    @property
    def api_port(self) -> int:
        return self.webhook_port + 2


class InstalledManager:
    """A manager whose manifests are on the cluster; its process can be stopped and started again."""

    def __init__(self, manager: ControllerManager, daemon: Daemon) -> None:
        self.manager = manager
        self.daemon = daemon

    def start(self) -> None:
        """Start the process and wait until its webhooks serve requests.

        Raises: HarnessError
        """
        self.daemon.start()
        wait_until_ready(self.manager, self.daemon)

    def stop(self) -> None:
        """Stop the process. Until it runs again, the API server rejects requests that its webhooks handle."""
        self.daemon.stop()


@contextmanager
def install_manager(cluster: ThrowawayCluster, manager: ControllerManager) -> Iterator[InstalledManager]:
    """Install a manager and wait until it is ready; remove everything afterwards.

    The empty certificate folder remains, because its removal would unmount the certificates of other managers.
    """
    CERTIFICATE_FOLDER.mkdir(exist_ok=True)
    upstream_manifests = read_upstream_manifests(build_manager(cluster, manager))
    documents = json.dumps({"apiVersion": "v1", "kind": "List", "items": adapt_manifests(manager, upstream_manifests)})
    cluster.kubectl.wait_for_removals("crd", "namespaces", timeout_seconds=TIMEOUT_SECONDS)  # of an earlier one
    cluster.kubectl("apply", "--server-side", "-f", "-", stdin=documents)
    cluster.kubectl.wait_for_crds(timeout_seconds=TIMEOUT_SECONDS)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        configuration = adapt_configuration(manager, upstream_manifests)
        (folder / CONFIGURATION_FILE).write_text(yaml.safe_dump(configuration))
        installed = InstalledManager(manager, build_daemon(cluster, manager, folder))
        installed.daemon.start()
        try:
            write_certificate(cluster, manager, folder / "serving-certs")
            wait_until_ready(manager, installed.daemon)
            yield installed
        finally:
            cluster.kubectl("delete", "--ignore-not-found", "--wait=false", "-f", "-", stdin=documents)
            installed.stop()


def build_manager(cluster: ThrowawayCluster, manager: ControllerManager) -> Path:
    """Build a manager; return the folder with its program and the upstream manifests.

    The build runs inside the module, as upstream's does, because `go install` needs the list of versions, which some
    proxies do not serve.
    """
    target = cluster.cache.get_binary_folder(manager.name, manager.version)
    with cluster.cache.hold_lock("build"), stage(f"build {manager.name} {manager.version}"):
        if not target.exists():
            require_go()
            environment = cluster.cache.go_environment
            download_command = ("go", "mod", "download", "-json", f"{manager.module}@v{manager.version}")
            downloaded = json.loads(run(*download_command, environment=environment))
            with tempfile.TemporaryDirectory() as scratch:
                source, build_folder = Path(scratch) / "source", Path(scratch) / "build"
                shutil.copytree(downloaded["Dir"], source)
                build_folder.mkdir()
                argv = (
                    "go",
                    "build",
                    "-trimpath",
                    "-ldflags",
                    "-s -w",
                    "-o",
                    build_folder / manager.name,
                    manager.package,
                )
                run(*argv, cwd=source, environment=environment)
                (build_folder / "documents.yaml").write_text(render_kustomization(cluster, source / manager.manifests))
                shutil.move(build_folder, target)
    return target


def render_kustomization(cluster: ThrowawayCluster, folder: Path) -> str:
    """Render the kustomization without the JobSet manifests, which Trainer would fetch from GitHub."""
    kustomization = folder / "kustomization.yaml"
    lines = kustomization.read_text().splitlines(keepends=True)
    kustomization.write_text("".join(line for line in lines if "third-party/jobset" not in line))
    return cluster.kubectl("kustomize", str(folder))


def read_upstream_manifests(folder: Path) -> list[RawBody]:
    """Return the manifests that build_manager rendered."""
    return list(yaml.safe_load_all((folder / "documents.yaml").read_text()))


def adapt_manifests(manager: ControllerManager, upstream_manifests: list[RawBody]) -> list[RawBody]:
    """Return the manifests without the Deployment, with webhooks that connect to a process on the API server's host."""
    omitted = ("Deployment",) if manager.serves_api else ("Deployment", "APIService")
    manifests = [manifest for manifest in upstream_manifests if manifest["kind"] not in omitted]
    for manifest in manifests:
        if manifest["kind"] == "Service":
            manifest["spec"] = {"type": "ExternalName", "externalName": "localhost"}
        if manifest["kind"] == "APIService":
            manifest["spec"]["service"]["port"] = manager.api_port
        for webhook in manifest.get("webhooks", ()):
            webhook["clientConfig"]["service"]["port"] = manager.webhook_port
    return manifests


def adapt_configuration(manager: ControllerManager, upstream_manifests: list[RawBody]) -> RawBody:
    """Return the upstream configuration with ports of the host and without metrics and leader election."""
    config_map = next(
        manifest
        for manifest in upstream_manifests
        if (manifest["kind"], manifest["metadata"]["name"]) == ("ConfigMap", manager.config_map)
    )
    configuration: RawBody = yaml.safe_load(config_map["data"][CONFIGURATION_FILE])
    host_fields = {
        "webhook": {"port": manager.webhook_port},
        "health": {"healthProbeBindAddress": f"127.0.0.1:{manager.health_port}"},
        "metrics": {"bindAddress": "0"},
        "leaderElection": {"leaderElect": False},
    }
    if manager.serves_api:
        host_fields["visibilityServer"] = {"bindPort": manager.api_port, "bindAddress": "127.0.0.1"}
    return configuration | {name: configuration.get(name, {}) | fields for name, fields in host_fields.items()}


def build_daemon(cluster: ThrowawayCluster, manager: ControllerManager, folder: Path) -> Daemon:
    """Return a daemon that runs the manager in a mount namespace with its certificate at the default path.

    It has the log level of the upstream Deployment.
    """
    program = cluster.cache.get_binary_folder(manager.name, manager.version) / manager.name
    api_certificate = f"mkdir -p {API_CERTIFICATE_FOLDER} && mount -t tmpfs tmpfs {API_CERTIFICATE_FOLDER} && "
    script = f'{api_certificate if manager.serves_api else ""}mount --bind "$0" {CERTIFICATE_FOLDER} && exec "$@"'
    argv = (
        *("env", f"KUBECONFIG={cluster.kubeconfig}", "unshare", "--mount", "sh", "-c", script, str(folder)),
        *(str(program), f"--config={folder / CONFIGURATION_FILE}", "--zap-log-level=2", *manager.arguments),
        *((f"--kubeconfig={cluster.kubeconfig}",) if manager.serves_api else ()),
    )
    return Daemon(name=manager.name, argv=argv, folder=cluster.layout.daemons)


def write_certificate(cluster: ThrowawayCluster, manager: ControllerManager, folder: Path) -> None:
    """Write the content of the manager's Secret to files, as a kubelet does."""
    data: dict[str, str] = {}
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while "tls.crt" not in data:
        if time.monotonic() > deadline:
            raise HarnessError(f"Secret {manager.namespace}/{manager.secret}: no certificate; it has {sorted(data)}")
        time.sleep(0.5)
        data = cluster.kubectl.get("secret", manager.secret, namespace=manager.namespace).get("data", {})
    folder.mkdir()
    for name, content in sorted(data.items(), reverse=True):  # write tls.crt last, because the manager waits for it
        (folder / name).write_bytes(base64.b64decode(content))


def wait_until_ready(manager: ControllerManager, daemon: Daemon) -> None:
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while not is_healthy(f"http://127.0.0.1:{manager.health_port}/readyz"):
        daemon.require_running()
        if time.monotonic() > deadline:
            raise HarnessError(f"{daemon.name} is not ready after {TIMEOUT_SECONDS} s: {daemon.read_log_tail()}")
        time.sleep(0.5)
