"""Build the message of GPU out-of-memory errors, with the micro-batch and the memory use."""

import torch

from finetune_trainer.data.micro_batch import MicroBatch
from finetune_trainer.errors import CudaOutOfMemory, first_line
from finetune_trainer.units import GIB

_MAX_LISTED_SEQUENCES = 16


def build_out_of_memory_error(error: torch.OutOfMemoryError, batch: MicroBatch, *, step: int) -> CudaOutOfMemory:
    """Return an error that describes the micro-batch and the memory use; the supervisor adds the rank.

    step: number of completed optimizer steps.
    """
    ids = batch.inputs["input_ids"]
    lengths = sorted(batch.lengths, reverse=True)[:_MAX_LISTED_SEQUENCES]
    shapes = ", ".join(
        f"{name} {tuple(value.shape)}" for name, value in batch.inputs.items() if isinstance(value, torch.Tensor)
    )
    return CudaOutOfMemory(
        f"ran out of GPU memory at step {step + 1} with a micro-batch of {len(batch.lengths)} sequences in"
        f" {len(ids)} x {ids.shape[1]} tokens (longest: {', '.join(map(str, lengths))}; {shapes});"
        f" {_describe_memory_use(ids.device, error)}"
    )


def _describe_memory_use(device: torch.device, error: torch.OutOfMemoryError) -> str:
    """Describe free, reserved and allocated memory; without a GPU, return the error's first line."""
    if device.type != "cuda":
        return first_line(error)
    free, total = torch.cuda.mem_get_info(device)
    allocated, reserved = torch.cuda.max_memory_allocated(device), torch.cuda.memory_reserved(device)
    return (
        f"of {total / GIB:.1f} GiB {free / GIB:.1f} were free, {reserved / GIB:.1f} reserved by this rank, and at"
        f" most {allocated / GIB:.1f} allocated at a time"
    )
