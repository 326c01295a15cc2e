"""Installs Kubeflow Trainer and JobSet on the throwaway cluster.

They are built from their Go modules and use the upstream manifests, CRDs, certificates and webhooks, except that the
managers run as host processes instead of pods.
"""

from __future__ import annotations

import base64
import json
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from testing.cluster.host.commands import HarnessError, run, stage
from testing.cluster.host.processes import Daemon
from testing.cluster.images.go_build import require_go
from testing.cluster.kubectl import is_healthy
from testing.cluster.throwaway import ThrowawayCluster

CERTIFICATE_FOLDER = Path("/tmp/k8s-webhook-server")  # default certificate folder of both managers
TIMEOUT_SECONDS = 120

RawBody = dict[str, Any]


@dataclass(frozen=True)
class KubeflowManager:
    """Controller manager to build and install.

    package: main package in the Go module. manifests: kustomize folder in the Go module. webhook_port: port that
    `arguments` sets; the next port serves the health probes.
    """

    name: str
    version: str
    module: str
    package: str
    manifests: str
    namespace: str
    secret: str
    webhook_port: int
    arguments: tuple[str, ...]

    @property
    def health_port(self) -> int:
        return self.webhook_port + 1


JOBSET = KubeflowManager(
    name="jobset",
    version="0.8.2",
    module="sigs.k8s.io/jobset",
    package=".",
    manifests="config/default",
    namespace="jobset-system",
    secret="jobset-webhook-server-cert",  # noqa: S106
    webhook_port=9443,
    arguments=("--leader-elect=false", "--metrics-bind-address=0"),
)
TRAINER = KubeflowManager(
    name="kubeflow-trainer",
    version="2.0.0",
    module="github.com/kubeflow/trainer/v2",
    package="./cmd/trainer-controller-manager",
    manifests="manifests/overlays/manager",
    namespace="kubeflow-system",
    secret="kubeflow-trainer-webhook-cert",  # noqa: S106
    webhook_port=9543,
    arguments=("--webhook-server-port=9543",),
)


@contextmanager
def install_managers(cluster: ThrowawayCluster) -> Iterator[None]:
    """Install both managers and wait until they are ready; remove everything afterwards."""
    CERTIFICATE_FOLDER.mkdir(exist_ok=True)
    with ExitStack() as stack:
        stack.callback(remove_certificate_folder)
        for manager in (JOBSET, TRAINER):
            stack.enter_context(install_manager(cluster, manager))
        yield


def remove_certificate_folder() -> None:
    """Remove the certificate folder unless it is in use.

    The folder is empty, because each manager mounts its certificate there in a private mount namespace.
    """
    with suppress(OSError):
        CERTIFICATE_FOLDER.rmdir()


@contextmanager
def install_manager(cluster: ThrowawayCluster, manager: KubeflowManager) -> Iterator[None]:
    manifests = adapt_manifests(manager, build_manager(cluster, manager))
    documents = json.dumps({"apiVersion": "v1", "kind": "List", "items": manifests})
    cluster.kubectl("apply", "--server-side", "-f", "-", stdin=documents)
    cluster.kubectl("wait", "crd", "--all", "--for=condition=Established", f"--timeout={TIMEOUT_SECONDS}s")
    with tempfile.TemporaryDirectory() as folder:
        daemon = build_daemon(cluster, manager, Path(folder))
        daemon.start()
        try:
            write_certificate(cluster, manager, Path(folder) / "serving-certs")
            wait_until_ready(manager, daemon)
            yield
        finally:
            cluster.kubectl("delete", "--ignore-not-found", "--wait=false", "-f", "-", stdin=documents)
            daemon.stop()


def build_manager(cluster: ThrowawayCluster, manager: KubeflowManager) -> Path:
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


def adapt_manifests(manager: KubeflowManager, folder: Path) -> list[RawBody]:
    """Return the manifests without the Deployment, with webhooks that connect to a process on the API server's host."""
    all_documents = yaml.safe_load_all((folder / "documents.yaml").read_text())
    documents = [document for document in all_documents if document["kind"] != "Deployment"]
    for document in documents:
        if document["kind"] == "Service":
            document["spec"] = {"type": "ExternalName", "externalName": "localhost"}
        for webhook in document.get("webhooks", ()):
            webhook["clientConfig"]["service"]["port"] = manager.webhook_port
    return documents


def build_daemon(cluster: ThrowawayCluster, manager: KubeflowManager, certificates: Path) -> Daemon:
    """Return a daemon that runs the manager in a mount namespace with its certificate at the default path."""
    program = cluster.cache.get_binary_folder(manager.name, manager.version) / manager.name
    script = f'mount --bind "$0" {CERTIFICATE_FOLDER} && exec "$@"'
    argv = (
        *("env", f"KUBECONFIG={cluster.kubeconfig}", "unshare", "--mount", "sh", "-c", script, str(certificates)),
        *(str(program), f"--health-probe-bind-address=127.0.0.1:{manager.health_port}", *manager.arguments),
    )
    return Daemon(name=manager.name, argv=argv, folder=cluster.layout.daemons)


def write_certificate(cluster: ThrowawayCluster, manager: KubeflowManager, folder: Path) -> None:
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


def wait_until_ready(manager: KubeflowManager, daemon: Daemon) -> None:
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while not is_healthy(f"http://127.0.0.1:{manager.health_port}/readyz"):
        daemon.require_running()
        if time.monotonic() > deadline:
            raise HarnessError(f"{daemon.name} is not ready after {TIMEOUT_SECONDS} s: {daemon.read_log_tail()}")
        time.sleep(0.5)
