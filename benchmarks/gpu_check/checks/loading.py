"""Measures the host memory of loading weights in another dtype directly to the GPU."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, Qwen2Config

from benchmarks.gpu_check.context import CheckContext, require
from finetune_api.v1alpha1.model_source import ModelSource
from finetune_trainer.model.load import describe_model, load_weights
from finetune_trainer.model.weight_loading import WeightLoading
from testing.models import tiny_text
from testing.processes.anonymous_memory import read_anonymous_bytes

SIZES, SMALL_SIZES = (2048, 8192, 12), (256, 1024, 4)  # hidden size, intermediate size, layers
MAX_SHARE = 0.3  # of the weights: a few tensors are in transit at the same time
SAMPLING_SECONDS = 0.005


def check_direct_loading(context: CheckContext) -> None:
    """Load 16-bit files as float32: on a GPU the host never holds all weights, on a CPU it does."""
    device = torch.device("cuda" if context.on_gpu else "cpu")
    folder = context.scratch / "direct loading"
    save_model(folder, *(SMALL_SIZES if context.small else SIZES))
    model_description = describe_model(ModelSource(name=str(folder)), torch.device("cpu"))
    with sample_memory() as memory:
        model = load_weights(model_description, torch.float32, WeightLoading(device))
    weight_bytes = sum(parameter.nbytes for parameter in model.parameters())
    share = memory.added_bytes / weight_bytes
    context.record(weights_gib=weight_bytes / 2**30, share_in_host_memory=share)
    require(
        all(parameter.device.type == device.type for parameter in model.parameters()), f"weights are not on {device}"
    )
    if context.on_gpu:
        require(share <= MAX_SHARE, f"loading needed {share:.0%} of the weights in host memory")
    else:
        require(share >= 1 - MAX_SHARE, f"only {share:.0%} of the weights were measured in host memory")


def save_model(folder: Path, hidden_size: int, intermediate_size: int, layers: int) -> None:
    """Save a model with random weights in bfloat16, and its tokenizer."""
    tokenizer = tiny_text.build_tokenizer()
    tokenizer.save_pretrained(folder)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_hidden_layers=layers,
        num_attention_heads=hidden_size // 64,
        num_key_value_heads=hidden_size // 64,
    )
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)


@dataclass
class AnonymousMemory:
    """Peak of the resident memory of this process without file pages, above its value at the start."""

    added_bytes: int = 0


@contextmanager
def sample_memory() -> Iterator[AnonymousMemory]:
    """Sample the memory of this process in a thread during the `with` block."""
    sample, before, stop = AnonymousMemory(), read_anonymous_bytes(), threading.Event()

    def update() -> None:
        sample.added_bytes = max(sample.added_bytes, read_anonymous_bytes() - before)

    def run() -> None:
        while not stop.wait(SAMPLING_SECONDS):
            update()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    yield sample
    stop.set()
    thread.join()
    update()
