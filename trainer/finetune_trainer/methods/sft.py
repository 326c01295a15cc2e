"""Supervised fine-tuning: cross entropy of the target tokens, averaged over the whole effective batch."""

from dataclasses import replace

import torch

from finetune_trainer.data.chat_template import ExampleRenderer, Sample
from finetune_trainer.data.token_dataset import IGNORE_INDEX, Features
from finetune_trainer.data_sources.conversations import Conversation, Role, parse_example
from finetune_trainer.data_sources.readers import Row
from finetune_trainer.training.base_trainer import GlobalMeanTrainer
from finetune_trainer.training.token_losses import compute_logits, compute_target_losses


def render_sample(renderer: ExampleRenderer, row: Row, *, loss_on: str) -> tuple[Sample, ...]:
    """Render a row into one sequence.

    loss_on: `assistant`, `lastTurn` or `all`, as spec.sft.lossOn. The completion of a row with prompt and completion
    counts as its only assistant turn.
    """
    example = parse_example(row)
    if loss_on == "lastTurn" and isinstance(example, Conversation):
        last = max(index for index, turn in enumerate(example.turns) if turn.role is Role.ASSISTANT)
        turns = (turn if index == last else replace(turn, weight=0.0) for index, turn in enumerate(example.turns))
        example = replace(example, turns=tuple(turns))
    sample = renderer.render(example)
    if loss_on == "all":
        sample = replace(sample, weights=_weights_of_all_text(sample))
    return (sample,)


def _weights_of_all_text(sample: Sample) -> list[float]:
    """Return weight 1 for every token but the first, which no token predicts, and the placeholders of images."""
    weights = [0.0, *[1.0] * (len(sample.input_ids) - 1)]
    for placeholder in sample.placeholders:
        weights[placeholder.start : placeholder.end] = [0.0] * (placeholder.end - placeholder.start)
    return weights


class SftTrainer(GlobalMeanTrainer):
    """Trainer for SFT. Its loss units are target tokens, each counted with its weight."""

    def count_loss_units(self, batch: Features) -> tuple[float, ...]:
        """Return the sum of the weights of all target tokens."""
        return (float(_target_weights(batch).sum()),)

    def sum_losses(self, model: torch.nn.Module, batch: Features) -> tuple[torch.Tensor, ...]:
        """Return the weighted sum of the cross entropy of all target tokens."""
        logits = compute_logits(model, batch)
        losses = compute_target_losses(logits, batch["labels"])
        return ((losses * _target_weights(batch)).sum() if "weights" in batch else losses.sum(),)


def _target_weights(batch: Features) -> torch.Tensor:
    """Return the weight of every target token, (targets,)."""
    is_target = batch["labels"][:, 1:] != IGNORE_INDEX
    return batch["weights"][:, 1:][is_target] if "weights" in batch else is_target[is_target]
