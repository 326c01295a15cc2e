"""Test the estimated FLOPs of a step and the peak FLOPs of GPUs."""

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

from finetune_api.v1alpha1.lora import Lora
from finetune_trainer.data.collator import Collator, SequenceLayout
from finetune_trainer.data.micro_batch import MicroBatch
from finetune_trainer.data.token_dataset import IGNORE_INDEX, POSITION_IDS
from finetune_trainer.metrics.flops import MicroBatchCounts, estimate_flops, peak_flops
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


def build_llama(*, tied_embeddings: bool = False) -> LlamaForCausalLM:
    return LlamaForCausalLM(LlamaConfig(**SMALL, tie_word_embeddings=tied_embeddings, attn_implementation="eager"))


def estimate_total(model: Any) -> float:
    return estimate_flops(model, has_reference=False).total(tokens=LENGTH, attention_pairs=LENGTH**2)


def count_flops_with_torch(model: Any) -> int:
    """Count the FLOPs of a forward and backward pass with torch, which counts attention over all pairs of tokens."""
    tokens = torch.arange(LENGTH).unsqueeze(0)
    with FlopCounterMode(display=False) as counter:
        model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
    total: int = counter.get_total_flops()
    return total


@pytest.mark.parametrize("tied_embeddings", [False, True])
def test_estimate_for_full_fine_tuning_equals_the_torch_count(tied_embeddings: bool) -> None:
    model = build_llama(tied_embeddings=tied_embeddings)

    assert estimate_total(model) == pytest.approx(count_flops_with_torch(model), rel=0.01)


def test_frozen_weights_need_no_weight_gradient() -> None:
    """torch counts less than the estimate, because no tensor before the first layer needs a gradient."""
    model = add_adapters(build_llama(), Lora(r=1), seed=0)

    assert estimate_total(model) == pytest.approx(count_flops_with_torch(model), rel=0.06)
    assert estimate_total(model) < 0.8 * estimate_total(build_llama())


def test_reference_model_adds_a_forward_pass() -> None:
    policy, with_reference = (estimate_flops(build_llama(), has_reference=has) for has in (False, True))

    assert with_reference.per_token / policy.per_token == pytest.approx(4 / 3)
    assert with_reference.per_attention_pair / policy.per_attention_pair == pytest.approx(4 / 3)


def test_only_active_experts_are_counted() -> None:
    two_active, four_active = (
        estimate_flops(
            MixtralForCausalLM(MixtralConfig(**SMALL, num_local_experts=8, num_experts_per_tok=active_experts)),
            has_reference=False,
        ).per_token
        for active_experts in (2, 4)
    )

    expert = 3 * SMALL["hidden_size"] * SMALL["intermediate_size"]
    assert four_active - two_active == pytest.approx(6 * 2 * expert * SMALL["num_hidden_layers"])


def test_modules_that_text_does_not_reach_are_not_counted() -> None:
    model = build_llama()
    layer = sum(weight.numel() for weight in model.model.layers[0].parameters() if weight.ndim > 1)

    for built in (model, add_adapters(build_llama(), Lora(r=1, target_modules=("q_proj",)), seed=0)):
        full, without_layer = (
            estimate_flops(built, has_reference=False, unused_modules=modules).per_token
            for modules in ((), ("model.layers.0",))
        )
        passes = 3 if built is model else 2
        assert full - without_layer == pytest.approx(2 * passes * layer, rel=0.05)


def build_rows(*lengths: int, has_targets: bool = True) -> MicroBatch:
    """Build a padded batch of rows with these lengths."""
    label = 1 if has_targets else IGNORE_INDEX
    rows = [{"input_ids": torch.arange(length), "labels": torch.full((length,), label)} for length in lengths]
    return Collator(0, SequenceLayout())([(row,) for row in rows])


def test_padding_is_not_counted() -> None:
    counts = MicroBatchCounts.from_batch(build_rows(3, 2), sequences_per_sample=1)

    assert counts == MicroBatchCounts(samples=2, tokens=5, shared_tokens=0, attention_pairs=6 + 3, longest_sequence=3)


def test_two_sequences_of_a_preference_are_counted_as_one_sample() -> None:
    assert MicroBatchCounts.from_batch(build_rows(3, 2, 2, 3), sequences_per_sample=2).samples == 2


def test_filler_is_not_counted_as_a_sample() -> None:
    assert MicroBatchCounts.from_batch(build_rows(1, has_targets=False), sequences_per_sample=1).samples == 0


def test_each_row_of_a_pack_is_counted_as_a_sample() -> None:
    packs = [
        ({"input_ids": ids, "labels": ids, POSITION_IDS: ids},)
        for ids in (torch.tensor([0, 1, 2, 0, 1]), torch.tensor([0, 1, 2, 3]))
    ]

    for layout in (SequenceLayout(), SequenceLayout(padding_free=True)):
        counts = MicroBatchCounts.from_batch(Collator(0, layout)(packs), sequences_per_sample=1)
        assert counts == MicroBatchCounts(3, tokens=9, shared_tokens=0, attention_pairs=6 + 3 + 10, longest_sequence=4)


def test_a_prompt_that_two_sequences_share_is_counted_once() -> None:
    labels = torch.tensor([IGNORE_INDEX, IGNORE_INDEX, IGNORE_INDEX, 1])
    pair = ({"input_ids": torch.arange(4), "labels": labels}, {"input_ids": torch.arange(4), "labels": labels})
    batch = Collator(0, SequenceLayout(padding_free=True, shares_prompts=True))([pair])

    counts = MicroBatchCounts.from_batch(batch, sequences_per_sample=2)

    assert counts == MicroBatchCounts(1, tokens=8, shared_tokens=2, attention_pairs=10 + 10 - 3, longest_sequence=4)


@pytest.mark.parametrize(
    ("device_name", "teraflops"),
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
def test_peak_flops_are_found_by_device_name(device_name: str, teraflops: float) -> None:
    assert peak_flops(device_name, torch.bfloat16) == pytest.approx(teraflops * 1e12)


@pytest.mark.parametrize("device_name", ["NVIDIA TITAN V", "AMD Radeon", ""])
def test_peak_flops_are_none_for_unknown_gpus_and_float32(device_name: str) -> None:
    assert peak_flops(device_name, torch.bfloat16) is None
    assert peak_flops("NVIDIA H100 80GB HBM3", torch.float32) is None
