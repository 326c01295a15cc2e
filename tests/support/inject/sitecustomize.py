"""First on the PYTHONPATH of a rank: micro-batches of more than MOST_SAMPLES run out of memory after a while.

Python imports a module of this name before any other.
"""

import os

if "LOCAL_RANK" in os.environ and "MOST_SAMPLES" in os.environ:
    import torch

    _embed = torch.nn.Embedding.forward
    _passes = 0

    def _embed_or_fail(self: torch.nn.Embedding, ids: torch.Tensor) -> torch.Tensor:
        global _passes
        _passes += type(ids) is torch.Tensor  # and not one of the memory forecast's, which hold nothing
        if _passes > int(os.environ["FINE_PASSES"]) and len(ids) > int(os.environ["MOST_SAMPLES"]):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return _embed(self, ids)

    torch.nn.Embedding.forward = _embed_or_fail  # type: ignore[assignment,method-assign]
