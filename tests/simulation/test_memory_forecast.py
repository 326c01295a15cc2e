"""What must hold of every forecast, whatever the model and the job."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import Qwen2Config

from finetune_api.v1alpha1.lora import Lora
from finetune_trainer.memory.breakdown import Layout, Parts, Spread, node_parts, rank_parts
from finetune_trainer.memory.fake_step import Live, Step, loss_of_every_token
from finetune_trainer.memory.model_shape import Architecture, ModelShape, measure_shape, measure_step
from finetune_trainer.memory.sharded import Sharded, Zero

SIZE = st.integers(min_value=0, max_value=10**12)


@st.composite
def shapes(draw: st.DrawFn) -> ModelShape:
    frozen, trained = draw(SIZE), draw(SIZE.filter(bool))
    return ModelShape(frozen + trained, trained, 2 * frozen, 4 * trained, draw(st.integers(0, 10**6)))


LIVES = st.builds(Live, SIZE, SIZE)
LAYOUTS = st.builds(Layout, st.integers(1, 4096), st.integers(1, 16), st.integers(0, 8), st.booleans())


def sizes(parts: Parts) -> dict[str, int]:
    return {part.name: part.size for part in parts.parts}


@given(shapes(), LIVES, LAYOUTS)
def test_no_part_is_empty_negative_or_named_twice(shape: ModelShape, live: Live, layout: Layout) -> None:
    for parts in (rank := rank_parts(shape, live, layout), node_parts(shape, rank, layout)):
        assert all(part.size > 0 for part in parts.parts)
        assert len(sizes(parts)) == len(parts.parts)
        assert parts.total == sum(sizes(parts).values()) >= parts.largest.size


@given(shapes(), LIVES, LAYOUTS, st.integers(2, 4096), st.integers(2, 4096))
def test_more_ranks_cost_a_rank_nothing(shape: ModelShape, live: Live, layout: Layout, few: int, many: int) -> None:
    first, second = (rank_parts(shape, live, replace(layout, world_size=ranks)) for ranks in (few, many))

    assert first == second


WAYS = st.one_of(
    st.builds(
        Zero,
        stage=st.integers(1, 3),
        itemsize=st.sampled_from((2, 4)),
        bucket=st.integers(0, 10**9),
        buffers=st.integers(1, 2),
        live=st.integers(0, 10**10),
        group=st.integers(1, 10**10),
        offloads_states=st.booleans(),
        offloads_weights=st.booleans(),
    ),
    st.builds(Sharded, itemsize=st.sampled_from((2, 4)), keeps_gathered=st.booleans(), offloads=st.booleans()),
)


@given(shapes(), LIVES, LAYOUTS, WAYS, st.integers(2, 64), st.integers(0, 64))
def test_what_is_spread_over_more_ranks_costs_each_no_more(
    shape: ModelShape, live: Live, layout: Layout, way: Spread, few: int, more: int
) -> None:
    first, second = (
        rank_parts(shape, live, replace(layout, spread=way, world_size=ranks)) for ranks in (few, few + more)
    )

    assert second.total <= first.total
    assert len(sizes(second)) == len(second.parts)


@given(shapes(), LIVES, LAYOUTS)
def test_more_ranks_on_a_node_cost_the_node(shape: ModelShape, live: Live, layout: Layout) -> None:
    rank = rank_parts(shape, live, layout)
    fewer, more = (node_parts(shape, rank, replace(layout, ranks_per_node=ranks)) for ranks in (1, 2))

    assert more.total == 2 * fewer.total


@given(shapes(), LIVES, LAYOUTS, st.integers(0, 10**12))
def test_whatever_grows_the_sum_does_not_shrink(shape: ModelShape, live: Live, layout: Layout, more: int) -> None:
    before = rank_parts(shape, live, layout).total

    assert rank_parts(shape, replace(live, activations=live.activations + more), layout).total >= before + more
    assert rank_parts(shape, replace(live, logits=live.logits + more), layout).total >= before + more
    assert rank_parts(replace(shape, frozen_bytes=shape.frozen_bytes + more), live, layout).total >= before + more


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


def total(architecture: Architecture, **fields: Any) -> int:
    given = {"checkpointing": False, "autocast": torch.bfloat16, "loss": loss_of_every_token, **fields}
    return measure_step(architecture, Step(**given)).total


@settings(max_examples=6, deadline=None)
@given(architectures(), st.integers(1, 3), st.integers(16, 200), st.integers(1, 100), st.booleans())
def test_a_step_grows_with_batch_and_length(
    architecture: Architecture, batch: int, length: int, further: int, checkpointing: bool
) -> None:
    here = total(architecture, batch=batch, length=length, checkpointing=checkpointing)

    assert here <= total(architecture, batch=batch + 1, length=length, checkpointing=checkpointing)
    assert here <= total(architecture, batch=batch, length=length + further, checkpointing=checkpointing)


@settings(max_examples=6, deadline=None)
@given(architectures(), st.integers(1, 3), st.integers(16, 200))
def test_checkpointing_raises_nothing_that_counts(architecture: Architecture, batch: int, length: int) -> None:
    """One layer alone gains nothing by it; the inputs that are kept beside are what it may cost."""
    kept = total(architecture, batch=batch, length=length)
    recomputed = total(architecture, batch=batch, length=length, checkpointing=True)

    assert recomputed <= kept + 2 * batch * length * architecture.config.hidden_size * 4


@settings(max_examples=6, deadline=None)
@given(architectures(), st.integers(16, 200))
def test_evaluation_needs_no_more_than_training(architecture: Architecture, length: int) -> None:
    assert total(architecture, batch=1, length=length, learns=False) <= total(architecture, batch=1, length=length)


@settings(max_examples=6, deadline=None)
@given(architectures())
def test_parameters_are_those_of_the_real_model(architecture: Architecture) -> None:
    from transformers import AutoModelForCausalLM

    real = AutoModelForCausalLM.from_config(architecture.config)
    shape = measure_shape(architecture)

    assert shape.parameters - (shape.trained_parameters if architecture.lora else 0) == real.num_parameters()
    assert shape.trained_bytes == shape.trained_parameters * 4
    assert (
        pytest.approx(shape.frozen_bytes + shape.trained_bytes)
        == 2 * (shape.parameters - shape.trained_parameters) + 4 * shape.trained_parameters
    )
