"""Property-based tests of memory forecasts for generated models and jobs."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import Qwen2Config

from finetune_api.v1alpha1.lora import Lora
from finetune_trainer.memory.breakdown import (
    MemoryBreakdown,
    RankLayout,
    ShardingStrategy,
    break_down_node_memory,
    break_down_rank_memory,
)
from finetune_trainer.memory.fake_step import ActivationMemory, SimulatedStep
from finetune_trainer.memory.model_shape import Architecture, ModelShape, measure_shape, measure_step_peak
from finetune_trainer.memory.sharded import Fsdp2Strategy, ZeroStrategy

SIZES = st.integers(min_value=0, max_value=10**12)


@st.composite
def model_shapes(draw: st.DrawFn) -> ModelShape:
    frozen, trained = draw(SIZES), draw(SIZES.filter(bool))
    return ModelShape(frozen + trained, trained, 2 * frozen, 4 * trained, draw(st.integers(0, 10**6)))


ACTIVATIONS = st.builds(ActivationMemory, SIZES, SIZES)
RANK_LAYOUTS = st.builds(RankLayout, st.integers(1, 4096), st.integers(1, 16), st.integers(0, 8), st.booleans())


def get_sizes_by_name(breakdown: MemoryBreakdown) -> dict[str, int]:
    return {part.name: part.size for part in breakdown.parts}


@given(model_shapes(), ACTIVATIONS, RANK_LAYOUTS)
def test_component_sizes_are_positive_and_their_names_unique(
    shape: ModelShape, activation_memory: ActivationMemory, rank_layout: RankLayout
) -> None:
    for breakdown in (
        rank := break_down_rank_memory(shape, activation_memory, rank_layout),
        break_down_node_memory(shape, rank, rank_layout),
    ):
        assert all(part.size > 0 for part in breakdown.parts)
        assert len(get_sizes_by_name(breakdown)) == len(breakdown.parts)
        assert (
            breakdown.total == sum(get_sizes_by_name(breakdown).values()) >= max(part.size for part in breakdown.parts)
        )


@given(model_shapes(), ACTIVATIONS, RANK_LAYOUTS, st.integers(2, 4096), st.integers(2, 4096))
def test_world_size_does_not_affect_rank_memory_without_sharding(
    shape: ModelShape, activation_memory: ActivationMemory, rank_layout: RankLayout, fewer_ranks: int, more_ranks: int
) -> None:
    first, second = (
        break_down_rank_memory(shape, activation_memory, replace(rank_layout, world_size=ranks))
        for ranks in (fewer_ranks, more_ranks)
    )

    assert first == second


STRATEGIES = st.one_of(
    st.builds(
        ZeroStrategy,
        stage=st.integers(1, 3),
        itemsize=st.sampled_from((2, 4)),
        bucket_size=st.integers(0, 10**9),
        buckets=st.integers(1, 2),
        max_live_parameters=st.integers(0, 10**10),
        sub_group_size=st.integers(1, 10**10),
        offload_optimizer=st.booleans(),
        offload_param=st.booleans(),
    ),
    st.builds(
        Fsdp2Strategy, itemsize=st.sampled_from((2, 4)), keeps_weights_gathered=st.booleans(), cpu_offload=st.booleans()
    ),
)


@given(model_shapes(), ACTIVATIONS, RANK_LAYOUTS, STRATEGIES, st.integers(2, 64), st.integers(0, 64))
def test_sharding_over_more_ranks_does_not_increase_memory_per_rank(
    shape: ModelShape,
    activation_memory: ActivationMemory,
    rank_layout: RankLayout,
    strategy: ShardingStrategy,
    fewer_ranks: int,
    added_ranks: int,
) -> None:
    first, second = (
        break_down_rank_memory(shape, activation_memory, replace(rank_layout, sharding=strategy, world_size=ranks))
        for ranks in (fewer_ranks, fewer_ranks + added_ranks)
    )

    assert second.total <= first.total
    assert len(get_sizes_by_name(second)) == len(second.parts)


@given(model_shapes(), ACTIVATIONS, RANK_LAYOUTS)
def test_node_memory_is_proportional_to_the_number_of_ranks(
    shape: ModelShape, activation_memory: ActivationMemory, rank_layout: RankLayout
) -> None:
    rank = break_down_rank_memory(shape, activation_memory, rank_layout)
    fewer, more = (break_down_node_memory(shape, rank, replace(rank_layout, ranks_per_node=ranks)) for ranks in (1, 2))

    assert more.total == 2 * fewer.total


@given(model_shapes(), ACTIVATIONS, RANK_LAYOUTS, st.integers(0, 10**12))
def test_total_memory_grows_by_at_least_the_added_bytes(
    shape: ModelShape, activation_memory: ActivationMemory, rank_layout: RankLayout, added_bytes: int
) -> None:
    before = break_down_rank_memory(shape, activation_memory, rank_layout).total

    assert (
        break_down_rank_memory(
            shape, replace(activation_memory, activations=activation_memory.activations + added_bytes), rank_layout
        ).total
        >= before + added_bytes
    )
    assert (
        break_down_rank_memory(
            shape, replace(activation_memory, logits=activation_memory.logits + added_bytes), rank_layout
        ).total
        >= before + added_bytes
    )
    assert (
        break_down_rank_memory(
            replace(shape, frozen_bytes=shape.frozen_bytes + added_bytes), activation_memory, rank_layout
        ).total
        >= before + added_bytes
    )


@st.composite
def architectures(draw: st.DrawFn) -> Architecture:
    heads = draw(st.sampled_from((2, 4)))
    config = Qwen2Config(
        hidden_size=heads * draw(st.sampled_from((8, 16))),
        num_attention_heads=heads,
        num_key_value_heads=draw(st.sampled_from((1, 2))),
        intermediate_size=draw(st.sampled_from((64, 160))),
        num_hidden_layers=draw(st.integers(1, 6)),
        vocab_size=draw(st.sampled_from((100, 3000))),
        tie_word_embeddings=draw(st.booleans()),
    )
    lora = draw(st.sampled_from((None, Lora(r=2), Lora(r=8, target_modules=("q_proj",)))))
    return Architecture(config, torch.bfloat16 if lora else torch.float32, lora)


def forecast_total_bytes(architecture: Architecture, **fields: Any) -> int:
    step_fields = {
        "recomputation_interval": None,
        "autocast": torch.bfloat16,
        **fields,
    }
    return measure_step_peak(architecture, SimulatedStep(**step_fields)).total


@settings(max_examples=6, deadline=None)
@given(architectures(), st.integers(1, 3), st.integers(16, 200), st.integers(1, 100), st.sampled_from((None, 1, 2)))
def test_step_memory_does_not_decrease_with_batch_size_or_sequence_length(
    architecture: Architecture, batch_size: int, sequence_length: int, added_tokens: int, interval: int | None
) -> None:
    total_bytes = forecast_total_bytes(
        architecture, batch=batch_size, length=sequence_length, recomputation_interval=interval
    )

    assert total_bytes <= forecast_total_bytes(
        architecture, batch=batch_size + 1, length=sequence_length, recomputation_interval=interval
    )
    assert total_bytes <= forecast_total_bytes(
        architecture,
        batch=batch_size,
        length=sequence_length + added_tokens,
        recomputation_interval=interval,
    )


@settings(max_examples=6, deadline=None)
@given(architectures(), st.integers(1, 3), st.integers(16, 200))
def test_gradient_checkpointing_adds_at_most_the_layer_inputs(
    architecture: Architecture, batch_size: int, sequence_length: int
) -> None:
    """With one layer, gradient checkpointing saves no memory and adds at most the stored layer inputs."""
    stored = forecast_total_bytes(architecture, batch=batch_size, length=sequence_length)
    recomputed = forecast_total_bytes(architecture, batch=batch_size, length=sequence_length, recomputation_interval=1)

    assert recomputed <= stored + 2 * batch_size * sequence_length * architecture.config.hidden_size * 4


@settings(max_examples=6, deadline=None)
@given(architectures(), st.integers(16, 200))
def test_evaluation_needs_at_most_the_memory_of_training(architecture: Architecture, sequence_length: int) -> None:
    assert forecast_total_bytes(
        architecture, batch=1, length=sequence_length, is_training=False
    ) <= forecast_total_bytes(architecture, batch=1, length=sequence_length)


@settings(max_examples=6, deadline=None)
@given(architectures())
def test_parameter_count_equals_that_of_the_real_model(architecture: Architecture) -> None:
    from transformers import AutoModelForCausalLM

    real = AutoModelForCausalLM.from_config(architecture.config)
    shape = measure_shape(architecture)

    assert shape.parameters - (shape.trained_parameters if architecture.lora else 0) == real.num_parameters()
    assert shape.trained_bytes == shape.trained_parameters * 4
    assert (
        pytest.approx(shape.frozen_bytes + shape.trained_bytes)
        == 2 * (shape.parameters - shape.trained_parameters) + 4 * shape.trained_parameters
    )
