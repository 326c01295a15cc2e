"""Save a sharded model in parts and as a whole, and measure both: `measure_checkpoints.py FOLDER MILLIONS`.

The model has MILLIONS of parameters, which FSDP2 shards over the ranks. Each rank writes a file RANK.json to FOLDER:

- `parts`, of a checkpoint as the trainer writes it, and `whole`, for which rank 0 gathers all tensors: `copied_bytes`
  of host memory for the copy, `copy_seconds`, in which training waits, and `write_seconds`
- `state_bytes` of weights and moments of the whole model
- `restored_bytes`, host memory that restoring the parts needed beyond the model
"""

import ctypes
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from finetune_trainer.atomic_files import fsync_files
from finetune_trainer.checkpoint.state_files import StateReader, write_state
from finetune_trainer.parallel.model_state import (
    KINDS,
    WEIGHT,
    TensorStateAccess,
    iterate_saved_ranges,
    iterate_trained_parameters,
    restore_state,
)
from finetune_trainer.training.checkpoint_state import copy_to_host
from testing.processes.anonymous_memory import read_anonymous_bytes

LAYERS = 16


def build_trained_model(millions: int) -> tuple[torch.nn.Module, torch.optim.AdamW]:
    """Return a sharded model and its optimizer after one step."""
    width = int((millions * 1e6 / LAYERS) ** 0.5)
    model = torch.nn.Sequential(*(torch.nn.Linear(width, width, bias=False) for _ in range(LAYERS)))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=False)
    model(torch.ones(1, width)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def return_freed_memory_at_once() -> None:
    """Let malloc map each tensor separately, so that measurements do not depend on memory that was freed before."""
    mmap_threshold_option, threshold_bytes = -3, 65_536
    assert ctypes.CDLL("libc.so.6").mallopt(mmap_threshold_option, threshold_bytes) == 1


def measure_parts(model: torch.nn.Module, access: TensorStateAccess, folder: Path) -> dict[str, Any]:
    """Save the checkpoint as the trainer does."""
    before, started_at = read_anonymous_bytes(), time.monotonic()
    copies = copy_to_host(iterate_saved_ranges(model, access))
    copied_bytes, copied_at = read_anonymous_bytes() - before, time.monotonic()
    folder.mkdir(exist_ok=True)
    paths = write_state(copies.items(), folder, rank=dist.get_rank())
    fsync_files(paths)
    dist.barrier()
    return {
        "copied_bytes": copied_bytes,
        "copy_seconds": copied_at - started_at,
        "write_seconds": time.monotonic() - copied_at,
        "file_bytes": sum(path.stat().st_size for path in paths),
    }


def measure_whole(model: torch.nn.Module, optimizer: torch.optim.AdamW, file: Path) -> dict[str, Any]:
    """Gather all tensors on rank 0, which writes one file."""
    before, started_at = read_anonymous_bytes(), time.monotonic()
    gathered: dict[str, torch.Tensor] = {}
    for name, parameter in iterate_trained_parameters(model):
        for kind in KINDS:
            tensor: Any = parameter.detach() if kind == WEIGHT else optimizer.state[parameter][kind]
            assert isinstance(tensor, DTensor)
            full_tensor = tensor.full_tensor()
            if dist.get_rank() == 0:
                gathered[f"{kind}.{name}"] = full_tensor
    copied_bytes, copied_at = read_anonymous_bytes() - before, time.monotonic()
    if gathered:
        save_file(gathered, file)
        fsync_files([file])
    dist.barrier()
    return {
        "copied_bytes": copied_bytes,
        "copy_seconds": copied_at - started_at,
        "write_seconds": time.monotonic() - copied_at,
        "file_bytes": file.stat().st_size if gathered else 0,
    }


def measure(folder: Path, millions: int) -> dict[str, Any]:
    """Save the checkpoint in both ways, then restore the parts."""
    model, optimizer = build_trained_model(millions)
    access = TensorStateAccess(optimizer, rank=dist.get_rank(), world_size=dist.get_world_size())
    results = {
        "state_bytes": len(KINDS) * sum(parameter.numel() * 4 for parameter in model.parameters()),
        "parts": measure_parts(model, access, folder / "parts"),
        "whole": measure_whole(model, optimizer, folder / "whole.safetensors"),
    }
    before = read_anonymous_bytes()
    restore_state(model, access, StateReader(folder / "parts").read, step=1)
    return {**results, "restored_bytes": read_anonymous_bytes() - before}


if __name__ == "__main__":
    return_freed_memory_at_once()
    dist.init_process_group("gloo")
    root = Path(sys.argv[1])
    results = json.dumps(measure(root, int(sys.argv[2])))
    (root / f"{dist.get_rank()}.json").write_text(results)
    print(f"rank {dist.get_rank()}: {results}", flush=True)
    dist.destroy_process_group()
