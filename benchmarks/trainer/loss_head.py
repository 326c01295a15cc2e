"""Measure the peak memory of the output layer and loss on CPU: `make bench-loss-head`.

One layer of a model with the vocabulary of Qwen2.5 and a narrow hidden size, in float32, is run forward and backward
on one sequence of target tokens: with the trainer's tiles, with all logits at once, and with the loss of TRL's
SFTTrainer, which runs in tiles too. Prints the peak of the memory of tensors beyond that of the weights.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Qwen2Config
from trl.trainer.utils import add_fused_lm_head

from finetune_trainer.memory.fake_step import select_all_tokens
from finetune_trainer.model.tiled_losses import compute_losses, compute_losses_at_once
from testing.models.allocation_tracker import AllocationTracker

VOCABULARY, HIDDEN_SIZE = 151_936, 64
TOKENS = (4096, 32_768)
MIB = 2**20
# Three copies of the logits of 32,768 tokens need 60 GB.
LARGEST_WITH_ALL_LOGITS = TOKENS[0]

RunStep = Callable[[Any, torch.Tensor], None]


def build_model(*, trains_output: bool) -> Any:
    """Build a model of one layer, whose weights are frozen except for the output layer if it is trained."""
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN_SIZE,
        intermediate_size=128,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        max_position_embeddings=max(TOKENS),
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.requires_grad_(False)
    model.get_input_embeddings().register_forward_hook(lambda _module, _inputs, output: output.requires_grad_())
    model.lm_head.requires_grad_(trains_output)
    return model


def run_ours(model: Any, ids: torch.Tensor, *, in_tiles: bool) -> None:
    """Compute the gradients of the trainer's loss."""
    function = compute_losses if in_tiles else compute_losses_at_once
    losses, _ = function(model, {"input_ids": ids, "use_cache": False}, select_all_tokens(ids))
    losses.mean().backward()  # type: ignore[no-untyped-call]


def run_trl(model: Any, ids: torch.Tensor) -> None:
    """Compute the gradients of the loss of TRL's SFTTrainer, with the metrics that it computes."""
    if "forward" not in model.__dict__:
        add_fused_lm_head(model, outputs=("log_probs", "entropy", "is_top1"))
    model(input_ids=ids, labels=ids, fused_lm_head=True).loss.backward()


CONTENDERS: dict[str, RunStep] = {
    "tiles": partial(run_ours, in_tiles=True),
    "all logits": partial(run_ours, in_tiles=False),
    "TRL": run_trl,
}


def measure_peak(run_step: RunStep, tokens: int, *, trains_output: bool) -> int:
    """Return the peak of the memory of tensors that a forward and backward pass allocates, in bytes."""
    model, ids = build_model(trains_output=trains_output), torch.arange(tokens).unsqueeze(0) % VOCABULARY
    run_step(model, ids[:, :16])  # the first pass records the operations after the output layer
    model.zero_grad()
    with AllocationTracker() as tracker:
        weights = [weight.view_as(weight) for weight in model.parameters()]  # the tracker counts used weights
        before = tracker.live_bytes
        run_step(model, ids)
    del weights
    return int(tracker.peak_bytes - before)


def main() -> None:
    """Print a Markdown table of the peaks in MiB."""
    print("| output layer | tokens | " + " | ".join(CONTENDERS) + " |")
    print("| --- | ---: |" + " ---: |" * len(CONTENDERS))
    for trains_output in (False, True):
        for tokens in TOKENS:
            peaks = [
                f"{measure_peak(run_step, tokens, trains_output=trains_output) / MIB:,.0f}"
                if tokens <= LARGEST_WITH_ALL_LOGITS or name != "all logits"
                else "not run"
                for name, run_step in CONTENDERS.items()
            ]
            row = ("trained" if trains_output else "frozen", f"{tokens:,}", *peaks)
            print(f"| {' | '.join(row)} |", flush=True)


if __name__ == "__main__":
    main()
