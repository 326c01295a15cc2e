"""Inject faults into the Python processes of a pod.

Python imports a module of this name at startup; tests put its folder first on the PYTHONPATH of the container.

After PASSES_BEFORE_FAULT forward passes with gradients (with DDP, the first one is the warm-up), a micro-batch of more
than OOM_ABOVE_SAMPLES sequences raises an error, unless OOM_BUT_WITH_DEEPSPEED is set and the job uses DeepSpeed; or
with INJECT_NAN, the output of the model becomes NaN.
A rank waits SLOW_CHECKPOINT_SECONDS after it has written its part of a checkpoint, before that is published.
On node 0, CLOCK_OFFSET_SECONDS shifts the wall clock, and with INJECT_STATUS the supervisor reports an impossible
progress in /status.
"""

import json
import os
import sys
import time

IMPOSSIBLE_PROGRESS = {"step": 1e308, "totalSteps": 2**60, "loss": "nan", "epoch": 1e308, "etaSeconds": -1e308}

if "CLOCK_OFFSET_SECONDS" in os.environ and os.environ.get("NODE_RANK") == "0":
    _time = time.time
    time.time = lambda: _time() + float(os.environ["CLOCK_OFFSET_SECONDS"])

if "INJECT_STATUS" in os.environ and os.environ.get("NODE_RANK") == "0":
    _dumps = json.dumps

    def _dump_impossible_status(body: object, **options: object) -> str:
        if isinstance(body, dict) and {"worldSize", "ranks"} <= body.keys():
            body = {**body, "progress": IMPOSSIBLE_PROGRESS, "firstStep": 2**60}
        return _dumps(body, **options)  # type: ignore[arg-type]

    json.dumps = _dump_impossible_status  # type: ignore[assignment]

is_rank = "LOCAL_RANK" in os.environ or "ranks" in sys.orig_argv  # ranks are forks of a process that imports torch

if is_rank and "SLOW_CHECKPOINT_SECONDS" in os.environ:
    import safetensors.torch

    _save_file = safetensors.torch.save_file

    def _save_slowly(tensors: dict, filename: os.PathLike, **options: object) -> None:  # type: ignore[type-arg]
        _save_file(tensors, filename, **options)  # type: ignore[arg-type]
        if "/state/" in str(filename):
            time.sleep(float(os.environ["SLOW_CHECKPOINT_SECONDS"]))

    safetensors.torch.save_file = _save_slowly  # type: ignore[assignment]

if is_rank and "PASSES_BEFORE_FAULT" in os.environ:
    import torch

    _call, _embed = torch.nn.Module.__call__, torch.nn.Embedding.forward
    _passes = _sequences = 0

    def _call_and_count(self: torch.nn.Module, *arguments: object, **options: object) -> object:
        global _sequences
        if "input_ids" in options:
            lengths = options.get("sequence_lengths")
            _sequences = len(options["input_ids"] if lengths is None else lengths.values)  # type: ignore[arg-type, attr-defined]
        return _call(self, *arguments, **options)

    def _embed_or_fail(self: torch.nn.Embedding, ids: torch.Tensor) -> torch.Tensor:
        global _passes
        # count neither the checks before the training nor the fake tensors of the memory forecast
        _passes += type(ids) is torch.Tensor and torch.is_grad_enabled()
        if _passes <= int(os.environ["PASSES_BEFORE_FAULT"]):
            return _embed(self, ids)
        # jobs without DeepSpeed hide it from imports
        is_exempt = "OOM_BUT_WITH_DEEPSPEED" in os.environ and sys.modules.get("deepspeed") is not None
        if _sequences > int(os.environ.get("OOM_ABOVE_SAMPLES", _sequences)) and not is_exempt:
            print(f"fault injected at {time.time()}", flush=True)
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        if "INJECT_NAN" in os.environ:
            print(f"fault injected at {time.time()}", flush=True)
            return _embed(self, ids) * torch.nan
        return _embed(self, ids)

    torch.nn.Module.__call__ = _call_and_count  # type: ignore[method-assign]
    torch.nn.Embedding.forward = _embed_or_fail  # type: ignore[assignment,method-assign]
