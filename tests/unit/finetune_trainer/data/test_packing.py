"""Rows in one sequence are as good as apart: the same logits, the same loss."""

from pathlib import Path

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

from finetune_trainer.data.batch_sampler import Collator
from finetune_trainer.data.chat_template import Sample
from finetune_trainer.data.packing import PackedDataset
from finetune_trainer.data.row_filter import Rules
from finetune_trainer.data.token_cache import obtain_tokens
from finetune_trainer.data.token_dataset import Features, TokenDataset
from finetune_trainer.errors import InvalidSpec
from finetune_trainer.methods.sft import SftTrainer, predict
from finetune_trainer.training.preflight import check_packs, two_rows_each
from testing.models import tiny_text as tiny

VOCABULARY = 64
SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.3,
}


def llama() -> PreTrainedModel:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SMALL)).eval()


def mistral() -> PreTrainedModel:
    """With a window smaller than the rows."""
    torch.manual_seed(0)
    return MistralForCausalLM(MistralConfig(**SMALL, sliding_window=4)).eval()


def qwen() -> PreTrainedModel:
    return tiny.build_model(VOCABULARY).eval()


def stateful() -> PreTrainedModel:
    torch.manual_seed(0)
    layers = ["linear_attention", "full_attention"]
    return Qwen3NextForCausalLM(Qwen3NextConfig(**SMALL, head_dim=8, layer_types=layers, num_experts=0)).eval()


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> TokenDataset:
    """Four rows of different lengths, the second halves learned, some with less weight."""
    drawn = np.random.default_rng(0)
    samples = [
        Sample(
            f"rows line {n}",
            drawn.integers(0, VOCABULARY, n).tolist(),
            [0.0] * (n // 2) + [0.5 + n % 2 / 2] * (n - n // 2),
        )
        for n in (9, 4, 7, 2)
    ]
    folder: Path = tmp_path_factory.mktemp("tokens") / "key"
    return obtain_tokens(folder, lambda: [(s,) for s in samples], rules=Rules(), writes=True, alive=lambda: None)


def collate(*samples: tuple[Features, ...]) -> Features:
    return Collator(pad_id=0)(samples)


@pytest.mark.parametrize("build", [qwen, llama, mistral])
@torch.no_grad()
def test_logits_in_a_pack_are_those_of_the_rows_alone(rows: TokenDataset, build: type[PreTrainedModel]) -> None:
    model, packs = build(), PackedDataset(rows)

    together = predict(model, collate(packs[(0, 1, 3)], packs[(2,)]))

    first, second = together
    apart = [predict(model, collate(rows[index]))[0] for index in range(4)]
    for row, packed in ((0, first[:9]), (1, first[9:13]), (3, first[13:15]), (2, second[:7])):
        torch.testing.assert_close(packed, apart[row], rtol=1e-5, atol=1e-5)
    assert (first[9:13] - predict(model, collate(rows[1]))[0].roll(1, dims=0)).abs().max() > 0.01


@torch.no_grad()
def test_with_the_mask_of_padding_the_rows_of_a_pack_would_see_each_other(rows: TokenDataset) -> None:
    """Why `predict` gives positions without a mask."""
    model = llama()
    batch = collate(PackedDataset(rows)[(0, 1)])

    together = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], use_cache=False).logits[0]

    assert (together[9:] - predict(model, collate(rows[1]))[0]).abs().max() > 0.1


@pytest.mark.parametrize("build", [qwen, llama, mistral])
@torch.no_grad()
def test_the_loss_of_packs_is_that_of_their_rows(rows: TokenDataset, build: type[PreTrainedModel]) -> None:
    trainer, model, packs = SftTrainer.__new__(SftTrainer), build(), PackedDataset(rows)
    packed, apart = collate(packs[(1, 2)], packs[(0, 3)]), collate(*(rows[index] for index in range(4)))

    assert trainer.count(packed) == trainer.count(apart) == (10.5,)
    assert float(*trainer.summed_losses(model, packed)) == pytest.approx(
        float(*trainer.summed_losses(model, apart)), rel=1e-5
    )


def test_a_pack_of_fillers_teaches_nothing(rows: TokenDataset) -> None:
    batch = collate(PackedDataset(rows)[-1])

    assert SftTrainer.__new__(SftTrainer).count(batch) == (0.0,)
    assert batch["position_ids"].tolist() == [[0]]


@pytest.mark.parametrize("build", [qwen, llama, mistral])
def test_models_that_keep_rows_apart_are_let_through_as_they_were(build: type[PreTrainedModel]) -> None:
    model = build().train()

    check_packs(model, two_rows_each(2, torch.device("cpu"), axes=False), name="tiny")

    assert model.training


def test_a_model_that_carries_something_over_is_refused_by_name() -> None:
    with pytest.raises(InvalidSpec, match=r'spec\.dataset\.packing: the rows .* not kept apart by model "tiny"'):
        check_packs(stateful(), two_rows_each(2, torch.device("cpu"), axes=False), name="tiny")


def test_a_model_without_positions_is_refused_by_name() -> None:
    with pytest.raises(InvalidSpec, match=r'spec\.dataset\.packing: model "tiny" takes no positions'):
        check_packs(torch.nn.Linear(1, 1), two_rows_each(2, torch.device("cpu"), axes=False), name="tiny")
