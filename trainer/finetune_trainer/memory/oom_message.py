"""Build the message of GPU out-of-memory errors, with the micro-batch and the memory use."""

from collections.abc import Mapping

import torch

from finetune_trainer.errors import CudaOutOfMemory, first_line
from finetune_trainer.units import GIB


def build_out_of_memory_error(
    error: torch.OutOfMemoryError, batch: Mapping[str, torch.Tensor], *, step: int
) -> CudaOutOfMemory:
    """Return an error that describes the micro-batch and the memory use; the supervisor adds the rank.

    step: number of completed optimizer steps. batch: input_ids and attention_mask are (batch, seq).
    """
    ids = batch["input_ids"]
    lengths = batch["attention_mask"].sum(dim=1).tolist()
    shapes = ", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in batch.items())
    return CudaOutOfMemory(
        f"ran out of GPU memory at step {step + 1} with a micro-batch of {len(ids)} x {ids.shape[1]} tokens (samples of"
        f" {', '.join(map(str, lengths))}; {shapes}); {_describe_memory_use(ids.device, error)}"
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
