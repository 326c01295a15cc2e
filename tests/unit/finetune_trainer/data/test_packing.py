"""Tests that packing does not change the logits and losses of rows."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from finetune_api.v1alpha1.training import Training
from finetune_trainer.chat_template.samples import Sample
from finetune_trainer.data.collator import Collator, SequenceLayout
from finetune_trainer.data.micro_batch import MicroBatch
from finetune_trainer.data.packing import PackedDataset
from finetune_trainer.data.row_filter import RowRules
from finetune_trainer.data.token_cache import CacheRole, load_or_tokenize
from finetune_trainer.data.token_dataset import Features, TokenDataset
from finetune_trainer.methods.sft import SftTrainer
from finetune_trainer.model.varlen_attention import VARLEN
from testing.models import attention_families, tiny_text
from testing.models.attention_families import VOCABULARY


def build_llama() -> PreTrainedModel:
    return attention_families.build_model(attention_families.CONFIGS["llama"]())


def build_mistral() -> PreTrainedModel:
    """Build a Mistral model whose sliding window is shorter than the rows."""
    return attention_families.build_model(attention_families.CONFIGS["mistral"]())


def build_qwen() -> PreTrainedModel:
    return tiny_text.build_model(VOCABULARY).eval()


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> TokenDataset:
    """Return four rows of different lengths; their second halves are targets, with weight 0.5 or 1."""
    generator = np.random.default_rng(0)
    samples = [
        Sample(
            f"rows line {n}",
            generator.integers(0, VOCABULARY, n).tolist(),
            [0.0] * (n // 2) + [0.5 + n % 2 / 2] * (n - n // 2),
        )
        for n in (9, 4, 7, 2)
    ]
    folder: Path = tmp_path_factory.mktemp("tokens") / "key"
    return load_or_tokenize(
        folder,
        lambda: [(sample,) for sample in samples],
        rules=RowRules(),
        role=CacheRole.WRITER,
        send_heartbeat=lambda: None,
    )


def collate(*samples: tuple[Features, ...], padding_free: bool = False) -> MicroBatch:
    return Collator(0, SequenceLayout(padding_free=padding_free))(samples)


def build_trainer() -> SftTrainer:
    """Return a trainer that only computes losses."""
    trainer = SftTrainer.__new__(SftTrainer)
    plan = SimpleNamespace(spec=SimpleNamespace(training=Training()))
    trainer.inputs = SimpleNamespace(plan=plan)  # type: ignore[assignment]
    return trainer


@pytest.mark.parametrize("build_model", [build_qwen, build_llama, build_mistral])
@torch.no_grad()
def test_packed_and_separate_rows_have_the_same_loss(rows: TokenDataset, build_model: type[PreTrainedModel]) -> None:
    trainer, model, packs = build_trainer(), build_model(), PackedDataset(rows)
    packed, separate = collate(packs[(1, 2)], packs[(0, 3)]), collate(*(rows[index] for index in range(4)))
    padding_free = collate(packs[(1, 2)], packs[(0, 3)], padding_free=True)

    assert {trainer.count_loss_units(batch) for batch in (packed, separate, padding_free)} == {(10.5,)}
    expected, actual = (float(*trainer.sum_losses(model, batch)) for batch in (separate, packed))
    assert actual == pytest.approx(expected, rel=1e-6)
    model.set_attn_implementation(VARLEN)
    assert float(*trainer.sum_losses(model, padding_free)) == pytest.approx(expected, rel=1e-6)


def test_a_filler_pack_has_no_loss_units(rows: TokenDataset) -> None:
    batch = collate(PackedDataset(rows)[-1])

    assert build_trainer().count_loss_units(batch) == (0.0,)
    assert batch.inputs["position_ids"].tolist() == [[0]]
