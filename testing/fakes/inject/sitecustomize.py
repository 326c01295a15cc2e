"""First on the PYTHONPATH of ranks, and of the launcher that forks them: after FINE_PASSES, micro-batches of more than
MOST_SAMPLES run out of memory, or, with GIVE_NAN, the model knows no number any more.

Python imports a module of this name before any other.
"""

import os
import sys

if ("LOCAL_RANK" in os.environ or "ranks" in sys.orig_argv) and "FINE_PASSES" in os.environ:
    import time

    import torch

    _embed = torch.nn.Embedding.forward
    _passes = 0

    def _embed_or_fail(self: torch.nn.Embedding, ids: torch.Tensor) -> torch.Tensor:
        global _passes
        _passes += type(ids) is torch.Tensor  # and not one of the memory forecast's, which hold nothing
        if _passes <= int(os.environ["FINE_PASSES"]):
            return _embed(self, ids)
        if "MOST_SAMPLES" in os.environ and len(ids) > int(os.environ["MOST_SAMPLES"]):
            print(f"fault strikes at {time.time()}", flush=True)
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        if "GIVE_NAN" in os.environ:
            print(f"fault strikes at {time.time()}", flush=True)
            return _embed(self, ids) * torch.nan
        return _embed(self, ids)

    torch.nn.Embedding.forward = _embed_or_fail  # type: ignore[assignment,method-assign]
