"""Provider for an existing cluster, selected by kubectl's current context."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from testing.cluster.host.cache import Cache
from testing.cluster.host.commands import HarnessError, run
from testing.cluster.images.tools import find_tool
from testing.cluster.storage import Object, create_shared_folder, render_shared_claim


@dataclass(frozen=True)
class CurrentContextProvider:
    """An existing cluster, which the tests neither start nor stop.

    `shared_root` must be mounted at the same path on this host and on every node, for example by NFS.
    """

    cache: Cache
    kubeconfig: Path
    shared_root: Path
    load_command: str

    @classmethod
    def from_environment(cls, cache: Cache, environment: Mapping[str, str]) -> CurrentContextProvider:
        shared_root, load_command = environment.get("CLUSTER_SHARED_FOLDER"), environment.get("CLUSTER_LOAD_IMAGE")
        if not shared_root or not load_command:
            raise HarnessError(
                "CLUSTER=current needs CLUSTER_SHARED_FOLDER, a folder mounted at the same path on this host and every "
                'node, and CLUSTER_LOAD_IMAGE, a command that accepts an image archive ("minikube image load")'
            )
        # KUBECONFIG may list several files; kubectl takes the current context from the first
        kubeconfigs = environment.get("KUBECONFIG") or str(Path.home() / ".kube" / "config")
        return cls(
            cache=cache,
            kubeconfig=Path(kubeconfigs.split(os.pathsep)[0]),
            shared_root=Path(shared_root),
            load_command=load_command,
        )

    @property
    def kubectl(self) -> Path:
        return find_tool("kubectl", self.cache)

    @property
    def helm(self) -> Path:
        return find_tool("helm", self.cache)

    @property
    def chaos(self) -> None:
        """Return None: no faults are injected into a cluster that others may use."""
        return

    def up(self) -> None:
        run(self.kubectl, "--kubeconfig", self.kubeconfig, "get", "--raw", "/readyz")

    def down(self) -> None:
        """Do nothing: the cluster existed before the tests."""

    def load_image(self, archive: Path) -> None:
        run(*shlex.split(self.load_command), archive)

    def get_shared_folder(self, namespace: str, claim: str) -> Path:
        return create_shared_folder(self.shared_root, namespace, claim)

    def build_shared_claim_objects(self, namespace: str, claim: str) -> tuple[Object, ...]:
        folder = self.get_shared_folder(namespace, claim)
        return render_shared_claim(namespace, claim, host_path=str(folder))
