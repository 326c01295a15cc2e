"""Choose the device of a rank: a GPU, or the CPU if there are no GPUs."""

import torch

from finetune_trainer.distributed.process_group import shares_gpus
from finetune_trainer.distributed.rank_context import Ranks
from finetune_trainer.errors import InvalidSpec


def choose_device(ranks: Ranks) -> torch.device:
    """Return the GPU of this rank and make it the current device; return the CPU if there are no GPUs.

    Raises InvalidSpec if there are more ranks than GPUs.
    """
    if not torch.cuda.is_available():
        return torch.device("cpu")
    if shares_gpus():
        index = ranks.local_rank % torch.cuda.device_count()
        torch.cuda.set_device(index)
        return torch.device("cuda", index)
    if ranks.local_world_size > torch.cuda.device_count():
        raise InvalidSpec(
            f"spec.nprocPerNode is {ranks.local_world_size}, but the pod has {torch.cuda.device_count()} GPUs;"
            " each rank needs one: lower nprocPerNode or raise resources.limits"
        )
    torch.cuda.set_device(ranks.local_rank)
    return torch.device("cuda", ranks.local_rank)


def get_device_name(device: torch.device) -> str:
    """Return the model name of a GPU, or "cpu"."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
