"""Manifests of checkpoints: owner, files with their checksums, and a checksum of the manifest itself."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from finetune_trainer.checksums import FileRecord, unseal
from finetune_trainer.errors import TrainerError
from finetune_trainer.foreign_files import read_regular_file

CHECKPOINT_PREFIX = "step-"  # name prefix of published checkpoints, such as step-00000100
_NAME = re.compile(rf"{CHECKPOINT_PREFIX}(\d{{8}}|[1-9]\d{{8,}})", re.ASCII)
MANIFEST = "manifest.json"
_CHECKSUMS = "crc32"  # missing in manifests of releases without checksums
# Entries beside the checkpoints that the trainer can compute again.
COMPUTED_ENTRIES = frozenset({"attention.json", "batch.json", "reference-logps"})


class UnusableCheckpoint(TrainerError):
    """A checkpoint is damaged or belongs to another job; the argument is the reason."""

    def __init__(self, reason: str, *, is_foreign: bool = False) -> None:
        super().__init__(reason)
        self.is_foreign = is_foreign


@dataclass(frozen=True)
class Manifest:
    """A manifest that was read; `files` contains the files of all ranks by their path in the checkpoint."""

    content: Mapping[str, Any]  # JSON object without its checksum; its owner is as in job.json
    files: Mapping[str, FileRecord]
    step: int
    has_checksums: bool


def read_manifest(folder: Path) -> Manifest:
    """Read and check the manifest of a checkpoint. Raises: UnusableCheckpoint, or OSError if it cannot be read."""
    try:
        content = unseal(read_regular_file(folder / MANIFEST), sealed_key=_CHECKSUMS)
        checksums = content.get(_CHECKSUMS, dict.fromkeys(content["files"]))
        files = {name: FileRecord(int(size), checksums[name]) for name, size in content["files"].items()}
        return Manifest(content, files, int(content["step"]), has_checksums=_CHECKSUMS in content)
    except (FileNotFoundError, NotADirectoryError):
        raise UnusableCheckpoint(f"{MANIFEST} is missing") from None
    except (ValueError, LookupError, TypeError, AttributeError, OverflowError) as error:
        raise UnusableCheckpoint(f"{MANIFEST} is damaged") from error


def list_checkpoints(folder: Path) -> list[Path]:
    """Return the folders with the name of a checkpoint, newest first; links are left out."""
    paths = [path for path in folder.glob(f"{CHECKPOINT_PREFIX}*") if _NAME.fullmatch(path.name)]
    return sorted((path for path in paths if not path.is_symlink()), key=parse_checkpoint_step, reverse=True)


def parse_checkpoint_step(checkpoint: Path) -> int:
    """Parse the number of completed optimizer steps from the name of a checkpoint folder."""
    return int(checkpoint.name.removeprefix(CHECKPOINT_PREFIX))
