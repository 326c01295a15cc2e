"""How many operations a step needs, counted from the model's weights, and how many a GPU can do."""

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

from finetune_api.v1alpha1.lora import Lora
from finetune_trainer.data.packing import POSITIONS
from finetune_trainer.data.token_dataset import IGNORED
from finetune_trainer.metrics.flops import Amount, measure_work, peak_flops
from finetune_trainer.model.lora import add_adapters

LENGTH = 32
SMALL: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
}


def llama(*, tied: bool = False) -> LlamaForCausalLM:
    return LlamaForCausalLM(LlamaConfig(**SMALL, tie_word_embeddings=tied, attn_implementation="eager"))


def counted(model: Any) -> int:
    """What torch itself counts in a forward and a backward pass; its attention is over all pairs, not half of them."""
    tokens = torch.arange(LENGTH).unsqueeze(0)
    with FlopCounterMode(display=False) as counter:
        model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
    total: int = counter.get_total_flops()
    return total


@pytest.mark.parametrize("tied", [False, True])
def test_full_tuning_needs_what_torch_counts(tied: bool) -> None:
    model = llama(tied=tied)

    needed = measure_work(model, has_reference=False).flops(tokens=LENGTH, pairs=LENGTH**2)

    assert needed == pytest.approx(counted(model), rel=0.01)


def test_frozen_weights_need_no_gradient_of_their_own() -> None:
    """torch counts less by the first layer, behind which nothing needs a gradient."""
    model = add_adapters(llama(), Lora(r=1), seed=0)

    needed = measure_work(model, has_reference=False).flops(tokens=LENGTH, pairs=LENGTH**2)

    assert needed == pytest.approx(counted(model), rel=0.06)
    assert needed < 0.8 * measure_work(llama(), has_reference=False).flops(tokens=LENGTH, pairs=LENGTH**2)


def test_a_reference_adds_a_forward_pass() -> None:
    alone, beside = (measure_work(llama(), has_reference=has) for has in (False, True))

    assert beside.per_token / alone.per_token == pytest.approx(4 / 3)
    assert beside.per_pair / alone.per_pair == pytest.approx(4 / 3)


def test_of_experts_those_count_that_a_token_goes_to() -> None:
    few, more = (
        measure_work(
            MixtralForCausalLM(MixtralConfig(**SMALL, num_local_experts=8, num_experts_per_tok=used)),
            has_reference=False,
        ).per_token
        for used in (2, 4)
    )

    expert = 3 * SMALL["hidden_size"] * SMALL["intermediate_size"]
    assert more - few == pytest.approx(6 * 2 * expert * SMALL["num_hidden_layers"])


def rows(*lengths: int, taught: bool = True) -> dict[str, torch.Tensor]:
    mask = torch.tensor([[1] * length + [0] * (max(lengths) - length) for length in lengths])
    return {"attention_mask": mask, "labels": torch.where(mask.bool() & taught, 1, IGNORED)}


def test_padding_counts_nowhere() -> None:
    assert Amount.of(rows(3, 2), sequences=1) == Amount(samples=2, tokens=5, pairs=6 + 3, longest=3)


def test_two_sequences_of_a_preference_are_one_sample() -> None:
    assert Amount.of(rows(3, 2, 1, 3), sequences=2).samples == 2


def test_a_filler_is_no_sample() -> None:
    assert Amount.of(rows(1, taught=False), sequences=1).samples == 0


def test_the_rows_of_a_pack_are_samples_that_attend_to_themselves_alone() -> None:
    pack = {**rows(5, 4), POSITIONS: torch.tensor([[0, 1, 2, 0, 1], [0, 1, 2, 3, 0]])}

    assert Amount.of(pack, sequences=1) == Amount(samples=3, tokens=9, pairs=6 + 3 + 10, longest=5)


@pytest.mark.parametrize(
    ("name", "tera"),
    [
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756.0),
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA A10", 125.0),
        ("NVIDIA A10G", 70.0),
        ("Tesla T4", 65.0),
        ("NVIDIA L40S", 362.0),
        ("NVIDIA GeForce RTX 4090", 165.2),
        ("Tesla V100-SXM2-16GB", 125.0),
    ],
)
def test_a_gpu_is_known_by_the_name_torch_gives_it(name: str, tera: float) -> None:
    assert peak_flops(name, torch.bfloat16) == pytest.approx(tera * 1e12)


@pytest.mark.parametrize("name", ["NVIDIA TITAN V", "AMD Radeon", ""])
def test_of_another_gpu_nothing_is_claimed(name: str) -> None:
    assert peak_flops(name, torch.bfloat16) is None
    assert peak_flops("NVIDIA H100 80GB HBM3", torch.float32) is None
