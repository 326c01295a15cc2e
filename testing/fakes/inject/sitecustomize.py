"""Inject faults into ranks: an out-of-memory error or NaN after a number of forward passes.

Python imports a module of this name at startup; tests put its folder first on the PYTHONPATH of launcher and ranks.
After PASSES_BEFORE_FAULT forward passes, a micro-batch of more than OOM_ABOVE_SAMPLES sequences raises an error, or
with INJECT_NAN the output of the model becomes NaN.
"""

import os
import sys

if ("LOCAL_RANK" in os.environ or "ranks" in sys.orig_argv) and "PASSES_BEFORE_FAULT" in os.environ:
    import time

    import torch

    _embed = torch.nn.Embedding.forward
    _passes = 0

    def _embed_or_fail(self: torch.nn.Embedding, ids: torch.Tensor) -> torch.Tensor:
        global _passes
        _passes += type(ids) is torch.Tensor  # do not count the fake tensors of the memory forecast
        if _passes <= int(os.environ["PASSES_BEFORE_FAULT"]):
            return _embed(self, ids)
        if "OOM_ABOVE_SAMPLES" in os.environ and len(ids) > int(os.environ["OOM_ABOVE_SAMPLES"]):
            print(f"fault injected at {time.time()}", flush=True)
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        if "INJECT_NAN" in os.environ:
            print(f"fault injected at {time.time()}", flush=True)
            return _embed(self, ids) * torch.nan
        return _embed(self, ids)

    torch.nn.Embedding.forward = _embed_or_fail  # type: ignore[assignment,method-assign]
