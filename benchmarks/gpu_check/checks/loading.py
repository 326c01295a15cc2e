"""Measures the host memory of loading weights in another dtype directly to the GPU."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.gpu_check.context import CheckContext, require
from finetune_api.v1alpha1.model_source import ModelSource
from finetune_trainer.model.load import describe_model, load_weights
from finetune_trainer.model.weight_loading import WeightLoading
from testing.models import tiny_text
from testing.processes.anonymous_memory import read_anonymous_bytes

SIZES: dict[str, Any] = {"hidden_size": 2048, "intermediate_size": 8192, "layers": 12}
SMALL_SIZES: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 1024, "layers": 4}
MAX_SHARE = 0.3  # of the weights: a few tensors are in transit at the same time
SAMPLING_SECONDS = 0.005


def check_direct_loading(context: CheckContext) -> None:
    """Load 16-bit files as float32: on a GPU the host never holds all weights, on a CPU it does."""
    device = torch.device("cuda" if context.on_gpu else "cpu")
    folder = context.scratch / "direct loading"
    tokenizer = tiny_text.build_tokenizer()
    tokenizer.save_pretrained(folder)
    tiny_text.save_bfloat16_model(folder, vocab_size=len(tokenizer), **(SMALL_SIZES if context.small else SIZES))
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
