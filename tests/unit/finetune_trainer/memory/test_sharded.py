"""What DeepSpeed and FSDP2 leave on a rank, and put into host memory, by plain sums."""

from typing import Any

import pytest
import torch

from finetune_api.v1alpha1.job import TrainerSpec
from finetune_trainer.memory.breakdown import Layout, Parts, node_parts, rank_parts, sum_up
from finetune_trainer.memory.fake_step import Live
from finetune_trainer.memory.model_shape import ModelShape
from finetune_trainer.memory.sharded import Sharded, Zero, spread_of
from testing.builders import jobs as builders

MILLION = 10**6
# 100 million numbers in bfloat16, all trained: embeddings and output of 10, nine layers of 10
FULL = ModelShape(
    parameters=100 * MILLION,
    trained_parameters=100 * MILLION,
    frozen_bytes=0,
    trained_bytes=200 * MILLION,
    buffer_bytes=0,
    layer_parameters=10 * MILLION,
    outer_parameters=10 * MILLION,
    largest_parameter=5 * MILLION,
)
IDLE = Live()
HIDDEN = 1000


def spread(**fields: Any) -> Zero | Sharded:
    spec = TrainerSpec.model_validate({**builders.spec(lora=None), **fields})
    found = spread_of(spec, torch.bfloat16, hidden_size=HIDDEN)
    assert isinstance(found, Zero | Sharded)
    return found


def layout(ranks: int, way: Zero | Sharded, *, on_gpu: bool = True) -> Layout:
    return Layout(ranks, ranks_per_node=2, loaders_per_rank=0, on_gpu=on_gpu, spread=way)


def in_millions(parts: Parts) -> dict[str, float]:
    return {part.name: part.size / MILLION for part in parts.parts}


def test_a_job_that_spreads_nothing_is_whole() -> None:
    spec = TrainerSpec.model_validate(builders.spec(lora=None))

    assert spread_of(spec, torch.bfloat16, hidden_size=HIDDEN) is None


@pytest.mark.parametrize(
    ("preset", "held"),
    [
        ("zero1", {"weights": 200, "weights in float32": 100, "optimizer states": 200}),
        ("zero2", {"weights": 200, "weights in float32": 100, "optimizer states": 200}),
        ("zero2_offload", {"weights": 200}),
        ("zero3", {"weights": 50, "gradients": 50, "weights in float32": 100, "optimizer states": 200}),
        ("zero3_offload", {}),
    ],
)
def test_what_a_stage_holds_on_each_of_four_gpus(preset: str, held: dict[str, float]) -> None:
    way = spread(deepspeed={"preset": preset})

    assert {part.name: part.size / MILLION for part in way.footprint(FULL, 4).held if part.size} == held


def test_what_is_offloaded_is_in_the_memory_of_the_node() -> None:
    way = spread(deepspeed={"preset": "zero3_offload"})
    ranks = layout(4, way)

    node = in_millions(node_parts(FULL, rank_parts(FULL, IDLE, ranks), ranks))

    weights, gradients, states = 50, (4 + 2) * 25, (4 + 8) * 25
    assert node["offloaded"] == 2 * (weights + gradients + states)


def test_without_a_gpu_it_is_in_that_of_the_rank() -> None:
    way = spread(deepspeed={"preset": "zero2_offload"})

    assert in_millions(rank_parts(FULL, IDLE, layout(4, way, on_gpu=False)))["offloaded optimizer states"] == 200


def test_gradients_of_the_first_stage_are_whole_until_the_update() -> None:
    first, second = (
        {
            part.name: part.size / MILLION
            for part in Zero(stage, 2, MILLION, 2, 10**9, 10**9).footprint(FULL, 4).computing
        }
        for stage in (1, 2)
    )

    assert first["gradients on their way"] == 200
    assert second["gradients on their way"] == 50 + 2 * 5, "its own, and the largest that is not on its way yet"


def test_the_update_counts_where_it_is_the_highest_moment() -> None:
    way = Zero(2, itemsize=2, bucket=MILLION, buffers=2, live=10**9, group=10**9)

    assert "gradients for the update" in in_millions(rank_parts(FULL, IDLE, layout(4, way)))
    assert "gradients for the update" not in in_millions(rank_parts(FULL, Live(10**9), layout(4, way)))


def test_no_more_is_gathered_than_the_config_says() -> None:
    way = spread(deepspeed={"config": {"zero_optimization": {"stage": 3, "stage3_max_live_parameters": 30 * MILLION}}})

    assert in_millions(rank_parts(FULL, Live(10**9), layout(4, way)))["gathered weights"] == 60


def test_buckets_of_auto_are_as_wide_as_the_model() -> None:
    preset, default = (
        spread(deepspeed=each) for each in ({"preset": "zero3"}, {"config": {"zero_optimization": {"stage": 3}}})
    )

    assert isinstance(preset, Zero)
    assert isinstance(default, Zero)
    assert (preset.bucket, default.bucket) == (HIDDEN**2, 500 * MILLION)


def test_fsdp_gathers_layers_or_all() -> None:
    in_turn, kept = (spread(fsdp={"reshardAfterForward": reshard}) for reshard in (True, False))
    busy = Live(10**9)

    assert in_millions(rank_parts(FULL, busy, layout(4, in_turn)))["gathered weights"] == 2 * (10 + 3 * 10)
    assert in_millions(rank_parts(FULL, busy, layout(4, kept)))["gathered weights"] == 2 * (100 + 10)


def test_fsdp_holds_a_share_in_float32_or_nothing() -> None:
    sharded, offloaded = (spread(fsdp={"cpuOffload": offload}).footprint(FULL, 4) for offload in (False, True))

    assert sum_up(sharded.held) == sum_up(offloaded.offloaded) == 16 * 25 * MILLION
    assert offloaded.held == sharded.offloaded == ()
