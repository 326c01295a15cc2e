"""Helpers for unit tests with tiny vision-language models."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from finetune_api.v1alpha1.dataset import Dataset
from finetune_api.v1alpha1.model_source import ModelSource
from finetune_trainer.data.collator import MultimodalCollator, SequenceLayout
from finetune_trainer.data.load import TokenizationConfig, TrainingData, load_data
from finetune_trainer.data.micro_batch import MicroBatch
from finetune_trainer.data.row_filter import RowRules
from finetune_trainer.data.row_rendering import RowRenderer, build_sft_renderer
from finetune_trainer.data.token_cache import CacheRole
from finetune_trainer.data_sources.media import Modality
from finetune_trainer.model.attention_backend import SDPA
from finetune_trainer.model.load import ModelDescription, describe_model, get_pad_token_id
from finetune_trainer.model.varlen_attention import VARLEN
from finetune_trainer.model.varlen_support import select_text_attention
from finetune_trainer.training.token_losses import compute_target_losses
from testing.fakes.downloads import NO_DOWNLOADS
from testing.models import tiny_text

ASSISTANT_TURNS = build_sft_renderer("assistant")


@dataclass(frozen=True)
class LoadedVisionModel:
    """A loaded vision-language model and a folder for its rows."""

    folder: Path
    model_description: ModelDescription
    model: Any

    def load_data(
        self, rows: Path, rules: RowRules | None = None, method: RowRenderer = ASSISTANT_TURNS, **fields: Any
    ) -> TrainingData:
        config = TokenizationConfig(
            tokenizer=self.model_description.tokenizer,
            model_name="tiny",
            row_renderer=method,
            rules=rules or RowRules(),
            seed=1,
            cache=self.folder / "cache",
            role=CacheRole.WRITER,
            send_heartbeat=lambda: None,
            downloads=NO_DOWNLOADS,
            vision=self.model_description.vision,
        )
        return load_data(Dataset.model_validate({"train": [{"name": str(rows)}], **fields}), config)

    @contextmanager
    def use_varlen(self) -> Iterator[None]:
        """Use attention over several sequences in one row in the `with` block."""
        config = self.model.config
        self.model.set_attn_implementation(select_text_attention(config, VARLEN))
        yield
        self.model.set_attn_implementation(select_text_attention(config, SDPA))

    def create_collator(
        self, *required_modalities: Modality, padding_free: bool = False, shares_prompts: bool = False
    ) -> MultimodalCollator:
        assert self.model_description.vision is not None
        return MultimodalCollator(
            get_pad_token_id(self.model_description.tokenizer),
            SequenceLayout(padding_free=padding_free, shares_prompts=shares_prompts),
            self.model_description.vision,
            required_modalities=required_modalities,
        )


def describe_folder(folder: Path, **fields: Any) -> ModelDescription:
    return describe_model(ModelSource.model_validate({"name": str(folder), **fields}), torch.device("cpu"))


def write_rows(folder: Path, *rows: dict[str, Any]) -> Path:
    tiny_text.write_jsonl(folder / "rows.jsonl", list(rows))
    return folder / "rows.jsonl"


def compute_gradients(model: torch.nn.Module, batch: MicroBatch) -> dict[str, torch.Tensor]:
    model.zero_grad(set_to_none=True)
    compute_target_losses(model, batch).sum().backward()  # type: ignore[no-untyped-call]
    gradients = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
    model.zero_grad(set_to_none=True)
    return gradients


def assert_close_up_to_rounding(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Assert equality with an absolute tolerance relative to the largest element.

    CPUs sum in different orders, so an element near zero has the rounding error of the largest terms.
    """
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-6 + 1e-5 * float(expected.abs().max()))
