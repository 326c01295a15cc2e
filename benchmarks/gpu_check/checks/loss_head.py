"""Measures the peak memory of the logits and the loss of one sequence, and compares it with the forecast."""

from typing import Any

import torch
from accelerate.utils import convert_outputs_to_fp32
from transformers import AutoModelForCausalLM, Qwen2Config

from benchmarks.gpu_check.context import CheckContext, require
from benchmarks.trainer.model_shapes import QWEN2_5_7B, SMALL
from finetune_trainer.memory.fake_step import SimulatedStep, compute_unmasked_token_loss
from finetune_trainer.memory.model_shape import Architecture, measure_step_peak
from finetune_trainer.training.token_losses import compute_logits, compute_target_losses
from testing.models.allocation_tracker import AllocationTracker

TOKENS, SMALL_TOKENS = 4096, 256
MAX_RATIO = 1.1  # the forecast excludes workspaces of cuBLAS


def check_peak(context: CheckContext) -> None:
    """Run one layer and the loss of 4096 tokens, as DDP in 16 bits does: accelerate widens the logits to float32."""
    device = torch.device("cuda" if context.on_gpu else "cpu")
    shape, tokens = (SMALL, SMALL_TOKENS) if context.small else (QWEN2_5_7B, TOKENS)
    config = Qwen2Config(**{**shape.text_config, "num_hidden_layers": 1}, tie_word_embeddings=True)
    dtype = torch.bfloat16 if context.on_gpu else torch.float32
    torch.manual_seed(0)
    with device:
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.requires_grad_(False)
    model.get_input_embeddings().register_forward_hook(lambda _module, _inputs, output: output.requires_grad_())
    if dtype is not torch.float32:
        model.forward = convert_outputs_to_fp32(model.forward)
    ids = torch.arange(tokens, device=device).unsqueeze(0) % config.vocab_size
    batch = {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)}
    compute_loss(model, {name: value[:, :16] for name, value in batch.items()})  # load cuBLAS and its workspace
    peak = measure_peak(model, batch, on_gpu=context.on_gpu)
    step = SimulatedStep(
        batch=1,
        length=tokens,
        gradient_checkpointing=False,
        autocast=dtype if context.on_gpu else None,
        loss=compute_unmasked_token_loss,
        packed=False,
    )
    forecast = measure_step_peak(Architecture(config, dtype, None), step)
    logits = tokens * config.vocab_size
    context.record(
        peak_gib=peak / 2**30,
        bytes_per_logit=peak / logits,
        forecast_gib=forecast.total / 2**30,
        forecast_bytes_per_logit=forecast.logits / logits,
    )
    require(peak <= MAX_RATIO * forecast.total, f"{peak / 2**30:.2f} GiB, forecast {forecast.total / 2**30:.2f} GiB")


def compute_loss(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> None:
    losses = compute_target_losses(compute_logits(model, batch), batch["labels"])
    losses.sum().backward()  # type: ignore[no-untyped-call]


def measure_peak(model: torch.nn.Module, batch: dict[str, Any], *, on_gpu: bool) -> int:
    """Return the peak of the memory of tensors that a forward and backward pass allocates, in bytes."""
    if not on_gpu:
        with AllocationTracker() as tracker:
            weights = [weight.view_as(weight) for weight in model.parameters()]  # the tracker counts used weights
            before = tracker.live_bytes
            compute_loss(model, batch)
        del weights
        return int(tracker.peak_bytes - before)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    compute_loss(model, batch)
    return int(torch.cuda.max_memory_allocated()) - before
