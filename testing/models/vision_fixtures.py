"""Tiny models that see, in the hands of unit tests."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from finetune_api.v1alpha1.dataset import Dataset
from finetune_api.v1alpha1.model_source import ModelSource
from finetune_trainer.data.load import Data, Method, Tokenizing, load_data
from finetune_trainer.data.row_filter import Rules
from finetune_trainer.data.token_dataset import Features
from finetune_trainer.data.vision_collator import SeeingCollator
from finetune_trainer.data_sources.media import Kind
from finetune_trainer.methods.sft import predict, render_sample, target_losses
from finetune_trainer.model.load import Pretrained, describe_model, pad_token_id
from testing.fakes.downloads import NONE
from testing.models import tiny_text as tiny

ANSWERS = Method("sft", partial(render_sample, loss_on="assistant"))


@dataclass(frozen=True)
class Loaded:
    """A tiny model that sees, and a folder for its rows."""

    folder: Path
    pretrained: Pretrained
    model: Any

    def data(self, rows: Path, rules: Rules | None = None, method: Method = ANSWERS, **fields: Any) -> Data:
        how = Tokenizing(
            tokenizer=self.pretrained.tokenizer,
            model_name="tiny",
            method=method,
            rules=rules or Rules(),
            seed=1,
            cache=self.folder / "cache",
            writes=True,
            alive=lambda: None,
            downloads=NONE,
            vision=self.pretrained.vision,
        )
        return load_data(Dataset.model_validate({"train": [{"name": str(rows)}], **fields}), how)

    def collate(self, *always: Kind) -> SeeingCollator:
        assert self.pretrained.vision is not None
        return SeeingCollator(pad_token_id(self.pretrained.tokenizer), self.pretrained.vision, always=always)


def describe(folder: Path, **fields: Any) -> Pretrained:
    return describe_model(ModelSource.model_validate({"name": str(folder), **fields}), torch.device("cpu"))


def write(folder: Path, *rows: dict[str, Any]) -> Path:
    tiny.write_jsonl(folder / "rows.jsonl", list(rows))
    return folder / "rows.jsonl"


def gradients_of(model: torch.nn.Module, batch: Features) -> dict[str, torch.Tensor]:
    model.zero_grad(set_to_none=True)
    target_losses(predict(model, batch), batch["labels"]).sum().backward()  # type: ignore[no-untyped-call]
    found = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
    model.zero_grad(set_to_none=True)
    return found


def assert_equal_but_for_rounding(found: torch.Tensor, gradient: torch.Tensor) -> None:
    """Processors add up in different orders: a number that cancels out differs by some of the largest's last digits."""
    torch.testing.assert_close(found, gradient, rtol=1e-4, atol=1e-6 + 1e-5 * float(gradient.abs().max()))
