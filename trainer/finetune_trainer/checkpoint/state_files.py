"""Write and read the tensors of a checkpoint, of which each rank writes a part, in files of its own (decisions/530).

The files have the safetensors format of torch.distributed.checkpoint: a tensor has the same key in several files, and
the metadata of each file contain the offset of its part. All tensors are flattened.
"""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from finetune_supervisor.contract import parse_json
from finetune_trainer.parallel.model_state import TensorRange

READ_ERRORS = (OSError, ValueError, RuntimeError, KeyError, TypeError, SafetensorError)  # that damaged files may cause
STATE_FOLDER = "state"
_FILE_NAME = "rank-{rank:05d}-{index:03d}.safetensors"
MAX_FILE_BYTES = 2**30
# Metadata that torch.distributed.checkpoint reads. safetensors writes entries of the metadata in random order; with a
# single entry, files with equal tensors are equal.
_OFFSETS_BY_KEY, _OFFSETS = "DCP_SHARDING_INFO", "saved_offsets"


def write_state(ranges: Iterable[tuple[str, TensorRange]], folder: Path, *, rank: int) -> list[Path]:
    """Write the ranges of one rank, by the key of their tensor, and return the paths of the files.

    Consumes `ranges` in groups of at most 1 GiB, which limits the memory of ranges that are copied from a GPU.
    """
    (folder / STATE_FOLDER).mkdir(exist_ok=True)
    paths: list[Path] = []
    for index, group in enumerate(_group_by_size(ranges)):
        paths.append(folder / STATE_FOLDER / _FILE_NAME.format(rank=rank, index=index))
        offsets = {key: {_OFFSETS: [tensor_range.start]} for key, tensor_range in group.items()}
        tensors = {key: tensor_range.values for key, tensor_range in group.items()}
        save_file(tensors, paths[-1], metadata={_OFFSETS_BY_KEY: json.dumps(offsets)})
    return paths


def _group_by_size(ranges: Iterable[tuple[str, TensorRange]]) -> Iterator[dict[str, TensorRange]]:
    """Yield the ranges in host memory, in groups of at most MAX_FILE_BYTES or of one larger range."""
    group: dict[str, TensorRange] = {}
    group_bytes = 0
    for key, tensor_range in ranges:
        if group and group_bytes + tensor_range.values.nbytes > MAX_FILE_BYTES:
            yield group
            group, group_bytes = {}, 0
        group[key] = TensorRange(tensor_range.start, tensor_range.values.cpu())
        group_bytes += tensor_range.values.nbytes
    if group:
        yield group


@dataclass(frozen=True)
class _Part:
    """Elements `start` to `stop` of a flattened tensor, in an open file."""

    start: int
    stop: int
    file: Any


class StateReader:
    """Reads any range of the flattened tensors of a checkpoint, whichever ranks wrote them.

    All methods raise one of READ_ERRORS if files are damaged or incomplete.
    """

    def __init__(self, folder: Path) -> None:
        self._parts: dict[str, list[_Part]] = {}
        for path in sorted((folder / STATE_FOLDER).glob("*.safetensors")):  # not copies such as *.safetensors.bak
            file: Any = safe_open(path, framework="pt")
            offsets = parse_json(file.metadata()[_OFFSETS_BY_KEY])
            for key in file.keys():  # noqa: SIM118 -- safe_open returns no dict
                start = offsets[key][_OFFSETS][0]
                size = torch.Size(file.get_slice(key).get_shape()).numel()
                self._parts.setdefault(key, []).append(_Part(start, start + size, file))
        for parts in self._parts.values():
            parts.sort(key=lambda part: part.start)

    def contains(self, key: str) -> bool:
        """Return whether the checkpoint contains a tensor with this key."""
        return key in self._parts

    def read(self, key: str, start: int, stop: int) -> torch.Tensor:
        """Return the elements from `start` to `stop` of a flattened tensor, in host memory."""
        pieces: list[torch.Tensor] = []
        position = start
        for part in self._parts[key]:
            if part.start <= position < min(part.stop, stop):
                end = min(part.stop, stop)
                pieces.append(part.file.get_slice(key)[position - part.start : end - part.start])
                position = end
        if position < stop:
            raise ValueError(f"elements {position} to {stop} of {key} are missing")
        return torch.cat(pieces) if pieces else torch.empty(0)

    def read_tensor(self, key: str, shape: torch.Size) -> torch.Tensor:
        """Return a complete tensor in its shape, in host memory."""
        return self.read(key, 0, shape.numel()).view(shape)
