"""Supervised fine-tuning: cross entropy on the tokens to learn, averaged over the whole effective batch."""

import torch

from finetune_trainer.data.batches import Collator
from finetune_trainer.data.tokens import IGNORED, Features
from finetune_trainer.methods.exact import ExactTrainer
from finetune_trainer.model.load import pad_token_id


class SftTrainer(ExactTrainer):
    """Its units are target tokens."""

    def collate(self) -> Collator:
        return Collator(pad_token_id(self.parts.tokenizer))

    def count(self, batch: Features) -> int:
        return int((batch["labels"][:, 1:] != IGNORED).sum())

    def summed_loss(self, model: torch.nn.Module, batch: Features) -> torch.Tensor:
        labels = batch["labels"]
        logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], use_cache=False).logits
        return summed_cross_entropy(logits, labels)


def summed_cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """(batch, length, vocabulary) and (batch, length) -> sum over the targets.

    Only their logits are widened to float32: prompts cost no memory. Ours, because not every model divides by the
    count that it is given.
    """
    targets = labels[:, 1:]
    learned = targets != IGNORED
    return torch.nn.functional.cross_entropy(logits[:, :-1][learned].float(), targets[learned], reduction="sum")
