"""Tests that packing does not change the logits and losses of rows."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

from finetune_api.v1alpha1.training import Training
from finetune_trainer.chat_template.samples import Sample
from finetune_trainer.data.collator import Collator
from finetune_trainer.data.packing import PackedDataset
from finetune_trainer.data.row_filter import RowRules
from finetune_trainer.data.token_cache import load_or_tokenize
from finetune_trainer.data.token_dataset import Features, TokenDataset
from finetune_trainer.errors import InvalidSpec
from finetune_trainer.methods.sft import SftTrainer
from finetune_trainer.training.packing_check import build_probe_packs, check_pack_isolation
from finetune_trainer.training.token_losses import compute_logits
from testing.models import tiny_text

VOCABULARY = 64
SMALL_CONFIG = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.3,
}


def build_llama() -> PreTrainedModel:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SMALL_CONFIG)).eval()


def build_mistral() -> PreTrainedModel:
    """Build a Mistral model whose sliding window is shorter than the rows."""
    torch.manual_seed(0)
    return MistralForCausalLM(MistralConfig(**SMALL_CONFIG, sliding_window=4)).eval()


def build_qwen() -> PreTrainedModel:
    return tiny_text.build_model(VOCABULARY).eval()


def build_recurrent_model() -> PreTrainedModel:
    """Build a model with linear attention, which carries state from one row to the next."""
    torch.manual_seed(0)
    layers = ["linear_attention", "full_attention"]
    return Qwen3NextForCausalLM(Qwen3NextConfig(**SMALL_CONFIG, head_dim=8, layer_types=layers, num_experts=0)).eval()


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
        folder, lambda: [(sample,) for sample in samples], rules=RowRules(), is_writer=True, send_heartbeat=lambda: None
    )


def collate(*samples: tuple[Features, ...]) -> Features:
    return Collator(pad_id=0)(samples)


def build_trainer() -> SftTrainer:
    """Return a trainer that only computes losses."""
    trainer = SftTrainer.__new__(SftTrainer)
    plan = SimpleNamespace(spec=SimpleNamespace(training=Training()))
    trainer.inputs = SimpleNamespace(plan=plan)  # type: ignore[assignment]
    return trainer


@pytest.mark.parametrize("build_model", [build_qwen, build_llama, build_mistral])
@torch.no_grad()
def test_packed_and_separate_rows_have_the_same_logits(rows: TokenDataset, build_model: type[PreTrainedModel]) -> None:
    model, packs = build_model(), PackedDataset(rows)

    together = compute_logits(model, collate(packs[(0, 1, 3)], packs[(2,)]))

    first, second = together
    separate = [compute_logits(model, collate(rows[index]))[0] for index in range(4)]
    for row, packed in ((0, first[:9]), (1, first[9:13]), (3, first[13:15]), (2, second[:7])):
        torch.testing.assert_close(packed, separate[row], rtol=1e-5, atol=1e-5)
    assert (first[9:13] - compute_logits(model, collate(rows[1]))[0].roll(1, dims=0)).abs().max() > 0.01


@torch.no_grad()
def test_packed_rows_with_an_attention_mask_attend_to_each_other(rows: TokenDataset) -> None:
    """`compute_logits` omits the attention mask of packed rows for this reason."""
    model = build_llama()
    batch = collate(PackedDataset(rows)[(0, 1)])

    together = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], use_cache=False).logits[0]

    assert (together[9:] - compute_logits(model, collate(rows[1]))[0]).abs().max() > 0.1


@pytest.mark.parametrize("build_model", [build_qwen, build_llama, build_mistral])
@torch.no_grad()
def test_packed_and_separate_rows_have_the_same_loss(rows: TokenDataset, build_model: type[PreTrainedModel]) -> None:
    trainer, model, packs = build_trainer(), build_model(), PackedDataset(rows)
    packed, separate = collate(packs[(1, 2)], packs[(0, 3)]), collate(*(rows[index] for index in range(4)))

    assert trainer.count_loss_units(packed) == trainer.count_loss_units(separate) == (10.5,)
    assert float(*trainer.sum_losses(model, packed)) == pytest.approx(
        float(*trainer.sum_losses(model, separate)), rel=1e-5
    )


def test_a_filler_pack_has_no_loss_units(rows: TokenDataset) -> None:
    batch = collate(PackedDataset(rows)[-1])

    assert build_trainer().count_loss_units(batch) == (0.0,)
    assert batch["position_ids"].tolist() == [[0]]


@pytest.mark.parametrize("build_model", [build_qwen, build_llama, build_mistral])
def test_the_isolation_check_accepts_suitable_models_and_keeps_their_training_mode(
    build_model: type[PreTrainedModel],
) -> None:
    model = build_model().train()

    check_pack_isolation(model, build_probe_packs(2, torch.device("cpu"), use_mrope=False), name="tiny")

    assert model.training


def test_a_model_that_carries_state_across_rows_is_rejected() -> None:
    with pytest.raises(InvalidSpec, match=r'spec\.dataset\.packing: model "tiny" does not isolate the rows'):
        check_pack_isolation(
            build_recurrent_model(), build_probe_packs(2, torch.device("cpu"), use_mrope=False), name="tiny"
        )


def test_a_model_without_position_ids_is_rejected() -> None:
    with pytest.raises(InvalidSpec, match=r'spec\.dataset\.packing: model "tiny" does not accept position_ids'):
        check_pack_isolation(
            torch.nn.Linear(1, 1), build_probe_packs(2, torch.device("cpu"), use_mrope=False), name="tiny"
        )
