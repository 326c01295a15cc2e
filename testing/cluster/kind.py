"""The same tests on kind, where Docker runs: nodes are containers, and a folder of this machine is in each of them."""

from __future__ import annotations

import json
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from testing.cluster.host.cache import Cache
from testing.cluster.host.commands import ClusterError, attempt, run, stage
from testing.cluster.images.oci import stream_missing
from testing.cluster.images.tools import find_tool
from testing.cluster.storage import Object, make_shared_folder, shared_claim_objects

SHARED_IN_NODES = "/shared"


@dataclass(frozen=True)
class KindProvider:
    """A kind cluster `finetune-<name>` with one control plane node and two others."""

    cache: Cache
    name: str = "dev"
    node_count: int = 2

    @property
    def cluster(self) -> str:
        return f"finetune-{self.name}"

    @property
    def root(self) -> Path:
        return self.cache.root / "kind" / self.name

    @property
    def kubeconfig(self) -> Path:
        return self.root / "admin.kubeconfig"

    @property
    def kubectl(self) -> Path:
        return find_tool("kubectl", self.cache)

    @property
    def helm(self) -> Path:
        return find_tool("helm", self.cache)

    @property
    def chaos(self) -> None:
        """Faults are made on the throwaway cluster only."""
        return

    def up(self) -> None:
        if reason := reason_kind_cannot_run():
            raise ClusterError(f"{reason}; or set CLUSTER=throwaway")
        self.shared.mkdir(parents=True, exist_ok=True)
        if self.cluster in run("kind", "get", "clusters").split():
            run("kind", "export", "kubeconfig", "--name", self.cluster, "--kubeconfig", self.kubeconfig)
            return
        configuration = json.dumps(render_kind_config(node_count=self.node_count, shared=self.shared))
        with stage(f"kind cluster {self.cluster} up"):
            run(
                *("kind", "create", "cluster", "--name", self.cluster, "--kubeconfig", self.kubeconfig),
                *("--config", "-", "--wait", "180s"),
                stdin=configuration,
            )

    def down(self) -> None:
        run("kind", "delete", "cluster", "--name", self.cluster, "--kubeconfig", self.kubeconfig)
        shutil.rmtree(self.root, ignore_errors=True)

    def load_image(self, archive: Path) -> None:
        """kind takes archives only, so an unpacked image is packed first."""
        with stage(f"load {archive.name} into kind"), tempfile.TemporaryDirectory() as scratch:
            packed = archive
            if archive.is_dir():
                packed = Path(scratch) / "image.tar"
                with packed.open("wb") as target:
                    stream_missing(archive, target, present=())
            run("kind", "load", "image-archive", packed, "--name", self.cluster)

    @property
    def shared(self) -> Path:
        return self.root / "shared"

    def shared_folder(self, namespace: str, claim: str) -> Path:
        return make_shared_folder(self.shared, namespace, claim)

    def shared_claim(self, namespace: str, claim: str) -> tuple[Object, ...]:
        self.shared_folder(namespace, claim)
        return shared_claim_objects(namespace, claim, host_path=f"{SHARED_IN_NODES}/{namespace}/{claim}")


def render_kind_config(*, node_count: int, shared: Path) -> dict[str, Any]:
    """JSON, which is YAML too. Every node mounts the same folder, so that a claim can be ReadWriteMany."""
    mounts = [{"hostPath": str(shared), "containerPath": SHARED_IN_NODES}]
    roles = ("control-plane", *("worker" for _ in range(node_count)))
    return {
        "kind": "Cluster",
        "apiVersion": "kind.x-k8s.io/v1alpha4",
        "nodes": [{"role": role, "extraMounts": mounts} for role in roles],
    }


def reason_kind_cannot_run() -> str | None:
    if not shutil.which("docker") or attempt("docker", "info").returncode != 0:
        return "Docker, for kind, does not run"
    return None if shutil.which("kind") else "kind is not installed (https://kind.sigs.k8s.io)"
