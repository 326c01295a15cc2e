"""Provider for kind clusters, which need Docker; every node container mounts a folder of this host."""

from __future__ import annotations

import json
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from testing.cluster.host.cache import Cache
from testing.cluster.host.commands import HarnessError, run, stage, try_run
from testing.cluster.images.oci import stream_missing
from testing.cluster.images.tools import find_tool
from testing.cluster.storage import Object, create_shared_folder, render_shared_claim

SHARED_IN_NODES = "/shared"


@dataclass(frozen=True)
class KindProvider:
    """A kind cluster `finetune-<name>` with one control plane node and `node_count` workers."""

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
        """Return None: faults are injected into the throwaway cluster only."""
        return

    def up(self) -> None:
        if reason := find_kind_problem():
            raise HarnessError(f"{reason}; or set CLUSTER=throwaway")
        self.shared_root.mkdir(parents=True, exist_ok=True)
        if self.cluster in run("kind", "get", "clusters").split():
            run("kind", "export", "kubeconfig", "--name", self.cluster, "--kubeconfig", self.kubeconfig)
            return
        configuration = json.dumps(render_kind_config(node_count=self.node_count, shared_folder=self.shared_root))
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
        """Load an image; an OCI layout is packed into an archive first, because kind accepts only archives."""
        with stage(f"load {archive.name} into kind"), tempfile.TemporaryDirectory() as scratch:
            image = archive
            if archive.is_dir():
                image = Path(scratch) / "image.tar"
                with image.open("wb") as target:
                    stream_missing(archive, target, present_digests=())
            run("kind", "load", "image-archive", image, "--name", self.cluster)

    @property
    def shared_root(self) -> Path:
        return self.root / "shared"

    def get_shared_folder(self, namespace: str, claim: str) -> Path:
        return create_shared_folder(self.shared_root, namespace, claim)

    def build_shared_claim_objects(self, namespace: str, claim: str) -> tuple[Object, ...]:
        self.get_shared_folder(namespace, claim)
        return render_shared_claim(namespace, claim, host_path=f"{SHARED_IN_NODES}/{namespace}/{claim}")


def render_kind_config(*, node_count: int, shared_folder: Path) -> dict[str, Any]:
    """Return the kind configuration; all nodes mount the same folder, so that a claim can be ReadWriteMany."""
    mounts = [{"hostPath": str(shared_folder), "containerPath": SHARED_IN_NODES}]
    roles = ("control-plane", *("worker" for _ in range(node_count)))
    return {
        "kind": "Cluster",
        "apiVersion": "kind.x-k8s.io/v1alpha4",
        "nodes": [{"role": role, "extraMounts": mounts} for role in roles],
    }


def find_kind_problem() -> str | None:
    if not shutil.which("docker") or try_run("docker", "info").returncode != 0:
        return "kind needs Docker, which is not running"
    return None if shutil.which("kind") else "kind is not installed (https://kind.sigs.k8s.io)"
