"""A cluster that exists already: whatever the current context of kubectl names."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from testing.cluster.host.cache import Cache
from testing.cluster.host.commands import ClusterError, run
from testing.cluster.images.tools import find_tool
from testing.cluster.storage import Object, make_shared_folder, shared_claim_objects


@dataclass(frozen=True)
class CurrentProvider:
    """Never started or ended by us. Its nodes must see `shared` at the same path as this machine (NFS, one node)."""

    cache: Cache
    kubeconfig: Path
    shared: Path
    load_command: str

    @classmethod
    def from_environment(cls, cache: Cache, environment: Mapping[str, str]) -> CurrentProvider:
        shared, load_command = environment.get("CLUSTER_SHARED_FOLDER"), environment.get("CLUSTER_LOAD_IMAGE")
        if not shared or not load_command:
            raise ClusterError(
                "CLUSTER=current needs CLUSTER_SHARED_FOLDER, a folder that this machine and every node see at the "
                'same path, and CLUSTER_LOAD_IMAGE, a command that takes an image archive ("minikube image load")'
            )
        # of several files that KUBECONFIG may list, the first exists and decides the current context
        listed = environment.get("KUBECONFIG") or str(Path.home() / ".kube" / "config")
        return cls(
            cache=cache,
            kubeconfig=Path(listed.split(os.pathsep)[0]),
            shared=Path(shared),
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
        """Nobody wants faults in a cluster that others may use."""
        return

    def up(self) -> None:
        run(self.kubectl, "--kubeconfig", self.kubeconfig, "get", "--raw", "/readyz")

    def down(self) -> None:
        """Nothing: it was there before."""

    def load_image(self, archive: Path) -> None:
        run(*shlex.split(self.load_command), archive)

    def shared_folder(self, namespace: str, claim: str) -> Path:
        return make_shared_folder(self.shared, namespace, claim)

    def shared_claim(self, namespace: str, claim: str) -> tuple[Object, ...]:
        folder = self.shared_folder(namespace, claim)
        return shared_claim_objects(namespace, claim, host_path=str(folder))
