"""Supervised fine-tuning: cross entropy on the tokens to learn, averaged over the whole effective batch."""

from dataclasses import replace

import torch

from finetune_trainer.data.chat_template import Renderer, Sample
from finetune_trainer.data.packing import AXES, POSITIONS
from finetune_trainer.data.token_dataset import IGNORED, Features
from finetune_trainer.data_sources.conversations import Conversation, Role, parse_example
from finetune_trainer.data_sources.readers import Row
from finetune_trainer.training.base_trainer import ExactTrainer
from finetune_trainer.vision.processor import SEEN


def render_sample(renderer: Renderer, row: Row, *, loss_on: str) -> tuple[Sample, ...]:
    """One sequence; of a prompt with its completion, the completion is the only turn of the assistant."""
    example = parse_example(row)
    if loss_on == "lastTurn" and isinstance(example, Conversation):
        last = max(index for index, turn in enumerate(example.turns) if turn.role is Role.ASSISTANT)
        turns = (turn if index == last else replace(turn, weight=0.0) for index, turn in enumerate(example.turns))
        example = replace(example, turns=tuple(turns))
    sample = renderer.render(example)
    if loss_on == "all":
        sample = replace(sample, weights=_all_words(sample))
    return (sample,)


def _all_words(sample: Sample) -> list[float]:
    """Every token but the first, which nothing predicts, and those that stand for images, which nobody writes."""
    weights = [0.0, *[1.0] * (len(sample.tokens) - 1)]
    for image in sample.shown:
        weights[image.start : image.end] = [0.0] * (image.end - image.start)
    return weights


class SftTrainer(ExactTrainer):
    """Its units are target tokens, each counted with its weight."""

    def count(self, batch: Features) -> tuple[float, ...]:
        return (float(_weights(batch).sum()),)

    def summed_losses(self, model: torch.nn.Module, batch: Features) -> tuple[torch.Tensor, ...]:
        logits = predict(model, batch)
        losses = target_losses(logits, batch["labels"])
        return ((losses * _weights(batch)).sum() if "weights" in batch else losses.sum(),)


def predict(model: torch.nn.Module, batch: Features) -> torch.Tensor:
    """Logits: (batch, length, vocabulary).

    Where there are positions, transformers sees by them which tokens belong together, but only if there is no mask and
    no cache. Padding then needs no mask either: nothing before it sees it.
    """
    kept_apart = POSITIONS if POSITIONS in batch else "attention_mask"
    inputs = {name: batch[name] for name in ("input_ids", kept_apart, *SEEN) if name in batch}
    if AXES in batch:  # positions first: by those rows are kept apart
        inputs[POSITIONS] = torch.cat((batch[POSITIONS].unsqueeze(0), batch[AXES].permute(2, 0, 1)))
    logits: torch.Tensor = model(**inputs, use_cache=False).logits
    return logits


def target_losses(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Cross entropy of every target: (batch, length, vocabulary), (batch, length) -> (targets,).

    Only their logits are widened to float32: prompts cost no memory. Ours, because not every model divides by the
    count that it is given.
    """
    targets = labels[:, 1:]
    learned = targets != IGNORED
    return torch.nn.functional.cross_entropy(logits[:, :-1][learned].float(), targets[learned], reduction="none")


def _weights(batch: Features) -> torch.Tensor:
    """Of every target: (targets,)."""
    learned = batch["labels"][:, 1:] != IGNORED
    return batch["weights"][:, 1:][learned] if "weights" in batch else learned[learned]
