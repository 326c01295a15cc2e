"""What is said when a GPU's memory ran out: of which micro-batch, and who held the memory."""

from collections.abc import Mapping

import torch

from finetune_trainer.errors import CudaOutOfMemory, first_line
from finetune_trainer.memory.gpus import GIB


def out_of_memory(error: torch.OutOfMemoryError, batch: Mapping[str, torch.Tensor], *, step: int) -> CudaOutOfMemory:
    """`step` is the last one done. The rank is told by who reads it."""
    ids = batch["input_ids"]
    lengths = batch["attention_mask"].sum(dim=1).tolist()
    shapes = ", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in batch.items())
    return CudaOutOfMemory(
        f"ran out of GPU memory at step {step + 1} with a micro-batch of {len(ids)} x {ids.shape[1]} tokens (samples of"
        f" {', '.join(map(str, lengths))}; {shapes}); {_held(ids.device, error)}"
    )


def _held(device: torch.device, error: torch.OutOfMemoryError) -> str:
    """By the allocator; where there is none, the error's own first line."""
    if device.type != "cuda":
        return first_line(error)
    free, total = torch.cuda.mem_get_info(device)
    allocated, reserved = torch.cuda.max_memory_allocated(device), torch.cuda.memory_reserved(device)
    return (
        f"of {total / GIB:.1f} GiB {free / GIB:.1f} were free, {reserved / GIB:.1f} reserved by this rank, and at"
        f" most {allocated / GIB:.1f} allocated at a time"
    )
