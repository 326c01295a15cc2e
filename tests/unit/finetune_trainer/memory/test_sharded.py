"""Test the memory that DeepSpeed and FSDP2 need on each rank and in host memory."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from finetune_trainer.memory.breakdown import (
    MemoryBreakdown,
    RankLayout,
    break_down_node_memory,
    break_down_rank_memory,
    sum_bytes,
)
from finetune_trainer.memory.fake_step import ActivationMemory
from finetune_trainer.memory.model_shape import ModelShape
from finetune_trainer.memory.sharded import Fsdp2Strategy, ZeroStrategy, build_sharding_strategy
from finetune_trainer.units import GIB
from testing.builders.jobs import parse_spec

MILLION = 10**6
# 100 million bfloat16 parameters, all trained: nine layers of 10 million, and 10 million outside the layers
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
# The same model with adapters of one million parameters
ADAPTED = replace(FULL, trained_parameters=MILLION, frozen_bytes=200 * MILLION, trained_bytes=2 * MILLION)
ZERO3 = {"deepspeed": {"preset": "zero3"}}
NO_ACTIVATIONS = ActivationMemory()
MANY_ACTIVATIONS = ActivationMemory(10**9)
HIDDEN_SIZE = 1000


def build_strategy(**fields: Any) -> ZeroStrategy | Fsdp2Strategy:
    spec = parse_spec(lora=None, **fields)
    strategy = build_sharding_strategy(spec, torch.bfloat16, hidden_size=HIDDEN_SIZE)
    assert isinstance(strategy, ZeroStrategy | Fsdp2Strategy)
    return strategy


def build_layout(ranks: int, sharding: ZeroStrategy | Fsdp2Strategy, *, on_gpu: bool = True) -> RankLayout:
    return RankLayout(ranks, ranks_per_node=2, loader_workers_per_rank=0, on_gpu=on_gpu, sharding=sharding)


def convert_to_millions(breakdown: MemoryBreakdown) -> dict[str, float]:
    return {part.name: part.size / MILLION for part in breakdown.parts}


def test_job_without_sharding_has_no_sharding_strategy() -> None:
    spec = parse_spec(lora=None)

    assert build_sharding_strategy(spec, torch.bfloat16, hidden_size=HIDDEN_SIZE) is None


@pytest.mark.parametrize(
    ("preset", "resident_megabytes"),
    [
        ("zero1", {"weights": 200, "gradients": 400, "weights in float32": 100, "optimizer states": 200}),
        ("zero2", {"weights": 200, "weights in float32": 100, "optimizer states": 200}),
        ("zero2_offload", {"weights": 200}),
        ("zero3", {"weights": 50, "gradients": 100, "weights in float32": 100, "optimizer states": 200}),
        ("zero3_offload", {}),
    ],
)
def test_zero_preset_determines_the_resident_model_states(preset: str, resident_megabytes: dict[str, float]) -> None:
    sharding = build_strategy(deepspeed={"preset": preset})

    parts = sharding.compute_footprint(FULL, 4).resident_parts
    assert {part.name: part.size / MILLION for part in parts if part.size} == resident_megabytes


def test_offloaded_states_count_as_host_memory_of_the_node() -> None:
    sharded = build_layout(4, build_strategy(deepspeed={"preset": "zero3_offload"}))

    node = convert_to_millions(
        break_down_node_memory(FULL, break_down_rank_memory(FULL, NO_ACTIVATIONS, sharded), sharded)
    )

    weights, gradients, states = 50, (4 + 4) * 25, (4 + 8) * 25
    assert node["offloaded"] == 2 * (weights + gradients + states)


def break_down_node(
    shape: ModelShape, sharding: ZeroStrategy | Fsdp2Strategy, *, ranks: int, on_gpu: bool = True
) -> dict[str, float]:
    layout = replace(build_layout(ranks, sharding, on_gpu=on_gpu), ranks_per_node=ranks)
    return convert_to_millions(
        break_down_node_memory(shape, break_down_rank_memory(shape, NO_ACTIVATIONS, layout), layout)
    )


@pytest.mark.parametrize("ranks", [1, 8])
@pytest.mark.parametrize(("parallelism", "reference_megabytes"), [({"fsdp": {}}, 100), (ZERO3, 0)])
def test_only_rank_zero_loads_weights_that_are_sharded(
    ranks: int, parallelism: dict[str, Any], reference_megabytes: float
) -> None:
    """FSDP2 shards the models after both are loaded; ZeRO-3 shards each while it is loaded."""
    node = break_down_node(replace(ADAPTED, reference_bytes=100 * MILLION), build_strategy(**parallelism), ranks=ranks)

    loaded = {"fsdp": 200 + 4, "deepspeed": 200 + 2}[next(iter(parallelism))]
    assert node["weights being loaded"] == loaded + reference_megabytes


def test_weights_that_are_offloaded_are_in_host_memory_beside_those_being_loaded() -> None:
    node = break_down_node(ADAPTED, build_strategy(fsdp={"cpuOffload": True}), ranks=4)

    assert (node["weights being loaded"], node["weights"]) == (204, 200 + 4)


def test_ranks_on_cpu_hold_their_shards_beside_the_weights_being_loaded() -> None:
    shape = replace(ADAPTED, layer_parameters=0, outer_parameters=0)  # training gathers no further weights

    node = break_down_node(shape, build_strategy(fsdp={}), ranks=4, on_gpu=False)

    assert (node["weights being loaded"], node["weights"]) == (204, 200 + 4)


@pytest.mark.parametrize("parallelism", [{"fsdp": {}}, {"deepspeed": {"preset": "zero1"}}, ZERO3])
def test_ranks_copy_their_parts_of_a_checkpoint_to_host_memory(parallelism: dict[str, Any]) -> None:
    layout = replace(build_layout(4, build_strategy(**parallelism)), copies_checkpoints=True)

    node = convert_to_millions(break_down_node_memory(FULL, MemoryBreakdown(()), layout))

    assert node["checkpoint being written"] == 2 * 3 * 100, "two of four ranks; weights and both moments in float32"


@pytest.mark.parametrize("on_gpu", [True, False])
@pytest.mark.parametrize("copies_checkpoints", [True, False])
def test_ranks_without_sharding_divide_the_checkpoint(copies_checkpoints: bool, on_gpu: bool) -> None:
    large = replace(FULL, trained_bytes=10 * GIB)
    layout = RankLayout(4, ranks_per_node=2, loader_workers_per_rank=0, on_gpu=on_gpu)
    layout = replace(layout, copies_checkpoints=copies_checkpoints)

    node = break_down_node_memory(large, break_down_rank_memory(large, NO_ACTIVATIONS, layout), layout)

    size = next((part.size for part in node.parts if part.name == "checkpoint being written"), 0)
    largest_file = GIB if on_gpu else 0  # a synchronous checkpoint is copied from the GPU, one file at a time
    assert size == 2 * (3 * large.trained_bytes // 4 if copies_checkpoints else largest_file)


def test_offloaded_states_count_for_the_rank_on_cpu() -> None:
    on_cpu = build_layout(4, build_strategy(deepspeed={"preset": "zero2_offload"}), on_gpu=False)

    assert (
        convert_to_millions(break_down_rank_memory(FULL, NO_ACTIVATIONS, on_cpu))["offloaded optimizer states"] == 200
    )


def test_stage_1_keeps_all_gradients_until_the_optimizer_step() -> None:
    first, second = (
        {
            part.name: part.size / MILLION
            for part in ZeroStrategy(stage, 2, MILLION, 2, 10**9, 10**9)
            .compute_footprint(FULL, 4)
            .forward_backward_parts
        }
        for stage in (1, 2)
    )

    assert first["gradients in transit"] == 200
    assert second["gradients in transit"] == 50 + 2 * 5, "its own shard, and the largest gradient not yet reduced"


def test_float32_gradients_are_kept_in_full_by_stage_1_and_as_a_shard_by_stage_2() -> None:
    first, second = (build_strategy(deepspeed={"preset": preset}) for preset in ("zero1", "zero2"))

    first_parts, second_parts = (
        convert_to_millions(break_down_rank_memory(FULL, MANY_ACTIVATIONS, build_layout(4, sharding)))
        for sharding in (first, second)
    )

    assert (first_parts["gradients"], first_parts["gradients in transit"]) == (4 * 100, 2 * 100)
    assert second_parts["gradients in transit"] == 4 * 25 + 2 * 100, "its shard, and the bucket that is being filled"
    assert second_parts["gradient buckets"] == (2 + 4) * 100, "a bucket in 16 bits and its copy in float32"


def test_raw_config_may_accumulate_gradients_in_16_bits() -> None:
    config = {"zero_optimization": {"stage": 3}, "data_types": {"grad_accum_dtype": "bf16"}}

    resident = build_strategy(deepspeed={"config": config}).compute_footprint(FULL, 4).resident_parts

    assert next(part.size for part in resident if part.name == "gradients") == 2 * 25 * MILLION


def test_optimizer_step_memory_counts_only_if_it_exceeds_the_activations() -> None:
    sharding = ZeroStrategy(
        2, itemsize=2, bucket_size=MILLION, buckets=2, max_live_parameters=10**9, sub_group_size=10**9
    )
    ranks = build_layout(4, sharding)

    assert "gradients for the update" in convert_to_millions(break_down_rank_memory(FULL, NO_ACTIVATIONS, ranks))
    assert "gradients for the update" not in convert_to_millions(break_down_rank_memory(FULL, MANY_ACTIVATIONS, ranks))


def test_max_live_parameters_limits_the_gathered_weights() -> None:
    zero = {"stage": 3, "stage3_max_live_parameters": 30 * MILLION}
    ranks = build_layout(4, build_strategy(deepspeed={"config": {"zero_optimization": zero}}))

    assert convert_to_millions(break_down_rank_memory(FULL, MANY_ACTIVATIONS, ranks))["gathered weights"] == 60


def test_auto_bucket_size_is_the_square_of_the_hidden_size() -> None:
    preset, default = (
        build_strategy(deepspeed=config)
        for config in ({"preset": "zero3"}, {"config": {"zero_optimization": {"stage": 3}}})
    )

    assert isinstance(preset, ZeroStrategy)
    assert isinstance(default, ZeroStrategy)
    assert (preset.bucket_size, default.bucket_size) == (HIDDEN_SIZE**2, 500 * MILLION)


def test_fsdp_gathers_layer_by_layer_or_the_full_model() -> None:
    resharding, gathered = (build_strategy(fsdp={"reshardAfterForward": reshard}) for reshard in (True, False))

    by_layer, at_once = (
        convert_to_millions(break_down_rank_memory(FULL, MANY_ACTIVATIONS, build_layout(4, sharding)))
        for sharding in (resharding, gathered)
    )

    assert by_layer["gathered weights"] == 2 * (10 + 3 * 10)
    assert at_once["gathered weights"] == 2 * (100 + 10)


def test_fsdp_keeps_a_float32_shard_on_the_gpu_or_offloads_it() -> None:
    sharded, offloaded = (
        build_strategy(fsdp={"cpuOffload": offload}).compute_footprint(FULL, 4) for offload in (False, True)
    )

    assert sum_bytes(sharded.resident_parts) == sum_bytes(offloaded.offloaded_parts) == 16 * 25 * MILLION
    assert offloaded.resident_parts == sharded.offloaded_parts == ()
