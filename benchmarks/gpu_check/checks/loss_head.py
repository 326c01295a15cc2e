"""Measures the peak memory of the loss of one sequence, in tiles and from all logits, beside its forecast."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from accelerate.utils import convert_outputs_to_fp32
from transformers import AutoModelForCausalLM, Qwen2Config

from benchmarks.gpu_check.context import CheckContext, require
from benchmarks.trainer.model_shapes import QWEN2_5_7B, SMALL
from finetune_trainer.memory.fake_step import SimulatedStep, select_all_tokens
from finetune_trainer.memory.model_shape import Architecture, measure_step_peak
from finetune_trainer.model.tiled_losses import Targets, compute_losses, compute_losses_at_once
from testing.models.allocation_tracker import AllocationTracker

TOKENS, SMALL_TOKENS = (4096, 32_768), (64, 512)
MAX_RATIO = 1.1  # the forecast excludes workspaces of cuBLAS

ComputeLosses = Callable[[Any, Mapping[str, Any], Targets], tuple[torch.Tensor, Any]]


def check_peak(context: CheckContext) -> None:
    """Run one layer and the loss in 16 bits, as DDP does: accelerate widens the model's outputs to float32."""
    device = torch.device("cuda" if context.on_gpu else "cpu")
    shape, lengths = (SMALL, SMALL_TOKENS) if context.small else (QWEN2_5_7B, TOKENS)
    config = Qwen2Config(**{**shape.text_config, "num_hidden_layers": 1}, tie_word_embeddings=True)
    dtype = torch.bfloat16 if context.on_gpu else torch.float32
    torch.manual_seed(0)
    with device:
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.requires_grad_(False)
    model.get_input_embeddings().register_forward_hook(lambda _module, _inputs, output: output.requires_grad_())
    if dtype is not torch.float32:
        model.forward = convert_outputs_to_fp32(model.forward)
    run_step(model, compute_losses, 16)  # load cuBLAS and its workspace
    # All logits of the longest sequence may not fit.
    runs = [(compute_losses, tokens) for tokens in lengths] + [(compute_losses_at_once, lengths[0])]
    for function, tokens in runs:
        peak = measure_peak(model, function, tokens)
        has_all_logits = function is compute_losses_at_once
        step = SimulatedStep(
            batch=1,
            length=tokens,
            recomputation_interval=None,
            autocast=dtype if context.on_gpu else None,
            without_savings=has_all_logits,
        )
        forecast = measure_step_peak(Architecture(config, dtype, None), step).total
        name = f"{tokens} tokens, {'all logits' if has_all_logits else 'tiles'}"
        context.record(**{f"{name}, peak gib": peak / 2**30, f"{name}, forecast gib": forecast / 2**30})
        require(peak <= MAX_RATIO * forecast, f"{name}: {peak / 2**30:.2f} GiB, forecast {forecast / 2**30:.2f} GiB")


def run_step(model: Any, function: ComputeLosses, tokens: int) -> None:
    ids = torch.arange(tokens, device=model.device).unsqueeze(0) % model.config.vocab_size
    losses, _ = function(model, {"input_ids": ids, "use_cache": False}, select_all_tokens(ids))
    losses.sum().backward()  # type: ignore[no-untyped-call]


def measure_peak(model: Any, function: ComputeLosses, tokens: int) -> int:
    """Return the peak of the memory of tensors that a forward and backward pass allocates, in bytes."""
    if model.device.type == "cpu":
        with AllocationTracker() as tracker:
            weights = [weight.view_as(weight) for weight in model.parameters()]  # the tracker counts used weights
            before = tracker.live_bytes
            run_step(model, function, tokens)
        del weights
        return int(tracker.peak_bytes - before)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run_step(model, function, tokens)
    return int(torch.cuda.max_memory_allocated()) - before
