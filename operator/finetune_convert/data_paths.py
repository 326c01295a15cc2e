"""Maps paths of the original machine to paths on volumes of the job."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath

from finetune_api.v1alpha1.pod_types import RESERVED_VOLUMES
from finetune_convert.conversion import EntryEffect, Tree, VolumeMount
from finetune_convert.job_draft import JobDraft

ASSUMED_MOUNT = VolumeMount("datasets", "/data")
_DATA_SUFFIXES = (".jsonl", ".json", ".csv", ".parquet", ".txt", ".yaml", ".yml", ".pt", ".pth", ".safetensors")


def is_path(name: str) -> bool:
    """Return whether a name is a path instead of a Hub id."""
    path = name.partition("#")[0]
    return path.startswith(("/", "./", "../", "~")) or path.endswith(_DATA_SUFFIXES) or path.count("/") > 1


@dataclass
class DataPaths:
    """Volumes of the job; paths that no volume contains are expected on an assumed one."""

    draft: JobDraft
    mounts: list[VolumeMount] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.mounts += self.draft.request.volumes

    def place(self, option: str, path: str, *, line: int | None = None) -> str:
        """Return the path at which the job reads a file or folder, and note where it must be."""
        normalised = _normalise(path)
        if any(_is_below(normalised, mount.mount_path) for mount in self.draft.request.volumes):
            return normalised
        mount = self.mounts[0] if self.mounts else self._assume_mount()
        is_inside = _is_below(normalised, mount.mount_path)
        placed = normalised if is_inside else str(PurePosixPath(mount.mount_path) / normalised.lstrip("/"))
        self._note(option, path, mount, placed, line)
        return placed

    def _assume_mount(self) -> VolumeMount:
        self.mounts.append(ASSUMED_MOUNT)
        return ASSUMED_MOUNT

    def _note(self, option: str, path: str, mount: VolumeMount, placed: str, line: int | None) -> None:
        inside = placed.removeprefix(mount.mount_path).lstrip("/") or "."
        assumed = ", which is assumed; name yours with --volume CLAIM:/path" if mount is ASSUMED_MOUNT else ""
        message = f"{path} is a path of the original machine; copy it to {inside} of the claim {mount.claim}{assumed}"
        self.draft.note(option, EntryEffect.EDIT, message, field="volumes", line=line)

    def add_volumes(self) -> None:
        """Add all volumes to the spec."""
        volumes = [_build_volume(mount, self.mounts[:index]) for index, mount in enumerate(self.mounts)]
        if volumes:
            self.draft.spec["volumes"] = [*self.draft.spec.get("volumes", []), *volumes]


def _normalise(path: str) -> str:
    """Return the path without leading ./, ../ and ~, which have no meaning in the pod."""
    parts = [part for part in path.split("/") if part not in ("", ".", "..", "~")]
    return ("/" if path.startswith("/") else "") + "/".join(parts)


def _is_below(path: str, folder: str) -> bool:
    return path == folder.rstrip("/") or path.startswith(folder.rstrip("/") + "/")


def _build_volume(mount: VolumeMount, earlier: Sequence[VolumeMount]) -> Tree:
    name = re.sub(r"[^a-z0-9]+", "-", mount.claim.lower()).strip("-")[:50] or "data"
    name = f"data-{name}" if name in RESERVED_VOLUMES else name
    count = sum(other.claim == mount.claim for other in earlier)
    return {
        "name": f"{name}-{count + 1}" if count else name,
        "mountPath": mount.mount_path,
        "persistentVolumeClaim": {"claimName": mount.claim},
    }
