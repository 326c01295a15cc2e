"""Kubeflow Trainer and JobSet on the throwaway cluster: built from their Go modules, with their own manifests, CRDs,
certificates and webhooks. Only their managers run as processes of the machine instead of pods.
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

from testing.cluster.host.commands import ClusterError, run, stage
from testing.cluster.host.processes import Daemon
from testing.cluster.images.go_build import require_go
from testing.cluster.kubectl import is_healthy
from testing.cluster.throwaway import ThrowawayCluster

CERTIFICATES = Path("/tmp/k8s-webhook-server")  # where both managers look for theirs
PATIENCE_SECONDS = 120

Raw = dict[str, Any]


@dataclass(frozen=True)
class Manager:
    """`webhook_port` is what it listens on by `arguments`; one above it tells whether it is ready. Of its module:
    `package` is its program, `manifests` what installs it.
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


JOBSET = Manager(
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
TRAINER = Manager(
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
def installed(cluster: ThrowawayCluster) -> Iterator[None]:
    """Both managers, ready; gone afterwards with all they brought."""
    CERTIFICATES.mkdir(exist_ok=True)
    with ExitStack() as begun:
        begun.callback(forget_folder)
        for manager in (JOBSET, TRAINER):
            begun.enter_context(one_installed(cluster, manager))
        yield


def forget_folder() -> None:
    """It is empty, as each manager has a view of its own, unless somebody else uses it."""
    with suppress(OSError):
        CERTIFICATES.rmdir()


@contextmanager
def one_installed(cluster: ThrowawayCluster, manager: Manager) -> Iterator[None]:
    documents = json.dumps({"apiVersion": "v1", "kind": "List", "items": render(manager, build(cluster, manager))})
    cluster.kubectl("apply", "--server-side", "-f", "-", stdin=documents)
    cluster.kubectl("wait", "crd", "--all", "--for=condition=Established", f"--timeout={PATIENCE_SECONDS}s")
    with tempfile.TemporaryDirectory() as folder:
        daemon = daemon_of(cluster, manager, Path(folder))
        daemon.start()
        try:
            bring_certificate(cluster, manager, Path(folder) / "serving-certs")
            wait_until_ready(manager, daemon)
            yield
        finally:
            cluster.kubectl("delete", "--ignore-not-found", "--wait=false", "-f", "-", stdin=documents)
            daemon.stop()


def build(cluster: ThrowawayCluster, manager: Manager) -> Path:
    """The folder of the program and of upstream's manifests in one file. Built in the module itself, as upstream does:
    `go install` asks for the module's newest version, which not every proxy tells.
    """
    target = cluster.cache.binaries(manager.name, manager.version)
    with cluster.cache.locked("build"), stage(f"build {manager.name} {manager.version}"):
        if not target.exists():
            require_go()
            environment = cluster.cache.go_environment
            asked = ("go", "mod", "download", "-json", f"{manager.module}@v{manager.version}")
            downloaded = json.loads(run(*asked, environment=environment))
            with tempfile.TemporaryDirectory() as scratch:
                source, made = Path(scratch) / "source", Path(scratch) / "made"
                shutil.copytree(downloaded["Dir"], source)
                made.mkdir()
                argv = ("go", "build", "-trimpath", "-ldflags", "-s -w", "-o", made / manager.name, manager.package)
                run(*argv, cwd=source, environment=environment)
                (made / "documents.yaml").write_text(kustomize(cluster, source / manager.manifests))
                shutil.move(made, target)
    return target


def kustomize(cluster: ThrowawayCluster, folder: Path) -> str:
    """Without what is fetched from GitHub: Trainer's manifests bring JobSet's so."""
    kustomization = folder / "kustomization.yaml"
    lines = kustomization.read_text().splitlines(keepends=True)
    kustomization.write_text("".join(line for line in lines if "third-party/jobset" not in line))
    return cluster.kubectl("kustomize", str(folder))


def render(manager: Manager, built: Path) -> list[Raw]:
    """Without the Deployment; its webhooks lead to this machine, on which the API server runs as well."""
    every = yaml.safe_load_all((built / "documents.yaml").read_text())
    documents = [document for document in every if document["kind"] != "Deployment"]
    for document in documents:
        if document["kind"] == "Service":
            document["spec"] = {"type": "ExternalName", "externalName": "localhost"}
        for webhook in document.get("webhooks", ()):
            webhook["clientConfig"]["service"]["port"] = manager.webhook_port
    return documents


def daemon_of(cluster: ThrowawayCluster, manager: Manager, certificates: Path) -> Daemon:
    """With a view of the machine in which its certificate is where a pod would have it."""
    program = cluster.cache.binaries(manager.name, manager.version) / manager.name
    script = f'mount --bind "$0" {CERTIFICATES} && exec "$@"'
    argv = (
        *("env", f"KUBECONFIG={cluster.kubeconfig}", "unshare", "--mount", "sh", "-c", script, str(certificates)),
        *(str(program), f"--health-probe-bind-address=127.0.0.1:{manager.health_port}", *manager.arguments),
    )
    return Daemon(name=manager.name, argv=argv, folder=cluster.layout.daemons)


def bring_certificate(cluster: ThrowawayCluster, manager: Manager, folder: Path) -> None:
    """The kubelet's part: what the manager puts into its Secret becomes files."""
    data: dict[str, str] = {}
    deadline = time.monotonic() + PATIENCE_SECONDS
    while "tls.crt" not in data:
        if time.monotonic() > deadline:
            raise ClusterError(f"Secret {manager.namespace}/{manager.secret}: no certificate; it has {sorted(data)}")
        time.sleep(0.5)
        data = cluster.kubectl.get("secret", manager.secret, namespace=manager.namespace).get("data", {})
    folder.mkdir()
    for name, content in sorted(data.items(), reverse=True):  # tls.crt after tls.key: it is what the manager waits for
        (folder / name).write_bytes(base64.b64decode(content))


def wait_until_ready(manager: Manager, daemon: Daemon) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not is_healthy(f"http://127.0.0.1:{manager.health_port}/readyz"):
        daemon.require_running()
        if time.monotonic() > deadline:
            raise ClusterError(f"{daemon.name} is not ready after {PATIENCE_SECONDS} s: {daemon.last_words()}")
        time.sleep(0.5)
