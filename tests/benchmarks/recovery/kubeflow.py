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
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from cluster.api import is_healthy
from cluster.commands import ClusterError, run
from cluster.gobuild import Installed, build
from cluster.processes import Daemon
from cluster.throwaway import ThrowawayCluster

CERTIFICATES = Path("/tmp/k8s-webhook-server")  # where both managers look for theirs
PATIENCE_SECONDS = 120

Raw = dict[str, Any]


@dataclass(frozen=True)
class Manager:
    """`webhook_port` is what it listens on by `arguments`; one above it tells whether it is ready."""

    component: Installed
    manifests: str
    namespace: str
    secret: str
    webhook_port: int
    arguments: tuple[str, ...]

    @property
    def health_port(self) -> int:
        return self.webhook_port + 1


JOBSET = Manager(
    component=Installed("jobset", "0.8.2", ("sigs.k8s.io/jobset",)),
    manifests="config/default",
    namespace="jobset-system",
    secret="jobset-webhook-server-cert",  # noqa: S106
    webhook_port=9443,
    arguments=("--leader-elect=false", "--metrics-bind-address=0"),
)
TRAINER = Manager(
    component=Installed(
        "kubeflow-trainer", "2.0.0", ("github.com/kubeflow/trainer/v2/cmd/trainer-controller-manager",)
    ),
    manifests="manifests/overlays/manager",
    namespace="kubeflow-system",
    secret="kubeflow-trainer-webhook-cert",  # noqa: S106
    webhook_port=9543,
    arguments=("--webhook-server-port=9543",),
)


@contextmanager
def installed(cluster: ThrowawayCluster) -> Iterator[None]:
    """Both managers, ready; gone afterwards with all they brought."""
    with ExitStack() as begun:
        for manager in (JOBSET, TRAINER):
            begun.enter_context(one_installed(cluster, manager))
        yield


@contextmanager
def one_installed(cluster: ThrowawayCluster, manager: Manager) -> Iterator[None]:
    build(cluster.cache, manager.component)
    documents = json.dumps({"apiVersion": "v1", "kind": "List", "items": render(cluster, manager)})
    cluster.kubectl("apply", "--server-side", "-f", "-", stdin=documents)
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


def render(cluster: ThrowawayCluster, manager: Manager) -> list[Raw]:
    """Upstream's manifests but for the Deployment; webhooks lead to this machine, where the API server is as well."""
    module, version = manager.component.module, manager.component.version
    downloaded = run(
        *("go", "mod", "download", "-json", f"{module}@v{version}"),
        cwd=cluster.root,
        environment=cluster.cache.go_environment,
    )
    with tempfile.TemporaryDirectory() as scratch:
        source = Path(scratch) / "source"
        shutil.copytree(json.loads(downloaded)["Dir"], source)
        kustomization = source / manager.manifests / "kustomization.yaml"
        lines = kustomization.read_text().splitlines(keepends=True)
        kustomization.write_text("".join(line for line in lines if "third-party/jobset" not in line))  # it is on GitHub
        text = cluster.kubectl("kustomize", str(kustomization.parent))
    documents = [document for document in yaml.safe_load_all(text) if document["kind"] != "Deployment"]
    for document in documents:
        if document["kind"] == "Service":
            document["spec"] = {"type": "ExternalName", "externalName": "localhost"}
        for webhook in document.get("webhooks", ()):
            webhook["clientConfig"]["service"]["port"] = manager.webhook_port
    return documents


def daemon_of(cluster: ThrowawayCluster, manager: Manager, certificates: Path) -> Daemon:
    """With a view of the machine in which its certificate is where a pod would have it."""
    CERTIFICATES.mkdir(exist_ok=True)
    name = manager.component.component
    program = cluster.cache.binaries(name, manager.component.version) / manager.component.programs[0]
    script = f'mount --bind "$0" {CERTIFICATES} && exec "$@"'
    argv = (
        *("env", f"KUBECONFIG={cluster.kubeconfig}", "unshare", "--mount", "sh", "-c", script, str(certificates)),
        *(str(program), f"--health-probe-bind-address=127.0.0.1:{manager.health_port}", *manager.arguments),
    )
    return Daemon(name=name, argv=argv, folder=cluster.layout.daemons)


def bring_certificate(cluster: ThrowawayCluster, manager: Manager, folder: Path) -> None:
    """The kubelet's part: what the manager puts into its Secret becomes files."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while "tls.crt" not in (
        data := cluster.kubectl.get("secret", manager.secret, namespace=manager.namespace).get("data", {})
    ):
        if time.monotonic() > deadline:
            raise ClusterError(f"Secret {manager.namespace}/{manager.secret}: no certificate; seen {sorted(data)}")
        time.sleep(0.5)
    folder.mkdir()
    for name, content in sorted(data.items(), reverse=True):  # the managers wait for the certificate, then take the key
        (folder / name).write_bytes(base64.b64decode(content))


def wait_until_ready(manager: Manager, daemon: Daemon) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not is_healthy(f"http://127.0.0.1:{manager.health_port}/readyz"):
        daemon.require_running()
        if time.monotonic() > deadline:
            raise ClusterError(f"{daemon.name} is not ready after {PATIENCE_SECONDS} s: {daemon.last_words()}")
        time.sleep(0.5)
