"""Test the memory forecast of a job, and the changes suggested for a job that does not fit."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import BloomConfig, Qwen2Config

from finetune_api.v1alpha1.job import TrainerSpec
from finetune_trainer.errors import InvalidSpec
from finetune_trainer.memory.breakdown import MemoryBreakdown, MemoryPart
from finetune_trainer.memory.forecast import Forecast, ForecastModel, forecast
from finetune_trainer.memory.gpus import USABLE_BYTES, find_fitting_gpus
from finetune_trainer.memory.model_shape import ModelShape
from finetune_trainer.memory.suggestions import choose_batch_size, suggest_changes
from finetune_trainer.training_plan import TrainingPlan, plan_training
from finetune_trainer.units import GIB
from testing.builders import jobs

TINY = ForecastModel(
    Qwen2Config(
        hidden_size=64,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=128,
        num_hidden_layers=2,
        vocab_size=500,
        max_position_embeddings=256,
    ),
    torch.bfloat16,
)


def parse_spec(*, length: int | None = 64, **fields: Any) -> TrainerSpec:
    dataset = {"train": [{"name": "/data/train.jsonl"}], "maxLength": length}
    return jobs.parse_spec(**{"lora": None, "dataset": dataset, **fields})


def build_plan(spec: TrainerSpec) -> TrainingPlan:
    return plan_training(spec, world_size=spec.world_size)


def forecast_part_bytes(spec: TrainerSpec, *, for_node: bool = False) -> dict[str, int]:
    result = forecast(build_plan(spec), TINY, on_gpu=True)
    return {part.name: part.size for part in (result.node if for_node else result.rank).parts}


def test_preference_needs_the_memory_of_two_samples() -> None:
    two_samples = parse_spec(lora={}, training={"perDeviceTrainBatchSize": 2})

    assert forecast_part_bytes(parse_spec(lora={}, sft=None, dpo={})) == forecast_part_bytes(two_samples)


def test_dpo_without_lora_needs_a_reference_model_with_the_dtypes_of_the_policy() -> None:
    """Under autocast, embeddings and norms are in float32, and linear layers in 16 bits."""
    sft, dpo = forecast_part_bytes(parse_spec()), forecast_part_bytes(parse_spec(sft=None, dpo={}))

    assert "reference model" not in sft
    assert dpo["weights"] / 2 < dpo["reference model"] < dpo["weights"]
    sharded = forecast_part_bytes(parse_spec(sft=None, dpo={}, deepspeed={"preset": "zero2"}))
    assert sharded["reference model"] == pytest.approx(dpo["weights"] / 2, rel=0.001)


@pytest.mark.parametrize("parallelism", [{}, {"fsdp": {}}, {"deepspeed": {"preset": "zero3"}}])
def test_a_reference_model_that_is_released_counts_only_while_it_is_loaded(parallelism: dict[str, Any]) -> None:
    kept, released = (
        parse_spec(sft=None, dpo={"precomputeRefLogProbs": value}, **parallelism) for value in (False, True)
    )

    kept_parts, released_parts = forecast_part_bytes(kept), forecast_part_bytes(released)
    differing = {name for name in kept_parts if kept_parts[name] != released_parts.get(name)}
    assert differing <= {"reference model", "fragmentation"}
    assert "reference model" in kept_parts.keys() - released_parts.keys()
    assert forecast_part_bytes(kept, for_node=True) == forecast_part_bytes(released, for_node=True)


WITHOUT_LOADERS = {"train": [{"name": "/data/train.jsonl"}], "numWorkers": 0}


def test_ranks_without_sharding_load_one_tensor_at_a_time_into_host_memory() -> None:
    spec = parse_spec(dataset=WITHOUT_LOADERS, nprocPerNode=4, lora={"r": 1})

    assert forecast_part_bytes(spec, for_node=True)["weights being loaded"] == 4 * (2 * 500 * 64), "the embedding"


def test_a_merge_loads_the_base_model_in_16_bits() -> None:
    spec = parse_spec(dataset=WITHOUT_LOADERS, lora={"merge": True})
    forecast_result = forecast(build_plan(spec), TINY, on_gpu=True)

    parts = {part.name: part.size for part in forecast_result.node.parts}
    assert parts["published model"] == 2 * forecast_result.shape.parameters


def test_sample_length_is_max_length_or_the_model_maximum() -> None:
    assert forecast(build_plan(parse_spec(length=None)), TINY, on_gpu=True).length == 256
    assert forecast(build_plan(parse_spec(length=64)), TINY, on_gpu=True).length == 64


def test_max_length_is_required_for_a_model_without_maximum() -> None:
    with pytest.raises(InvalidSpec, match=r"spec.dataset.maxLength: .* set maxLength, or memory cannot be forecast"):
        forecast(build_plan(parse_spec(length=None)), ForecastModel(BloomConfig(), torch.bfloat16), on_gpu=True)


def test_larger_evaluation_batch_raises_the_forecast() -> None:
    dataset = {"train": [{"name": "/data/a.jsonl"}], "eval": [{"name": "/data/b.jsonl"}], "maxLength": 64}
    small, large = (
        forecast(
            build_plan(
                parse_spec(dataset=dataset, training={"perDeviceTrainBatchSize": 1, "perDeviceEvalBatchSize": size})
            ),
            TINY,
            on_gpu=True,
        ).rank.total
        for size in (1, 64)
    )

    assert large > small


def fake_forecast(spec: TrainerSpec) -> Forecast:
    """Forecast 20 GiB for full fine-tuning, 4 GiB for LoRA, 1 GiB for 4-bit weights, plus 4 GiB per 1024 tokens.

    zero2 halves the model states; zero3 divides them by eight.
    """
    batch, length = build_plan(spec).batch, spec.dataset.max_length or 2048
    per_sample = 4 * GIB * length // 1024 // (4 if spec.training.gradient_checkpointing else 1)
    states = (20 if spec.lora is None else 1 if spec.lora.quantization else 4) * GIB
    if spec.deepspeed and spec.deepspeed.preset != "zero1":
        states //= 2 if spec.deepspeed.preset == "zero2" else 8
    breakdown = MemoryBreakdown(
        (MemoryPart("states", states), MemoryPart("samples", batch.micro_batch_size * per_sample))
    )
    return Forecast(ModelShape(0, 0, 0, 0, 0), batch, length, breakdown, breakdown, on_gpu=True)


@pytest.mark.parametrize(
    ("usable_gib", "changes"),
    [
        pytest.param(40, ("training.gradientCheckpointing: true",), id="gradient checkpointing"),
        pytest.param(
            24,
            (
                "training.gradientCheckpointing: true",
                "training.perDeviceTrainBatchSize: 2, training.gradientAccumulationSteps: 2",
            ),
            id="gradient checkpointing and smaller micro-batches",
        ),
        pytest.param(12, ("training.gradientCheckpointing: true", "lora: {}"), id="lora"),
        pytest.param(
            4,
            (
                "training.gradientCheckpointing: true",
                "training.perDeviceTrainBatchSize: 1, training.gradientAccumulationSteps: 4",
                "lora: {}",
                "lora.quantization: nf4",
            ),
            id="lora on 4-bit weights",
        ),
        pytest.param(
            2,
            (
                "training.gradientCheckpointing: true",
                "training.perDeviceTrainBatchSize: 1, training.gradientAccumulationSteps: 4",
                "lora: {}",
                "lora.quantization: nf4",
                "dataset.maxLength: 1024",
            ),
            id="shorter samples",
        ),
    ],
)
def test_cheapest_change_that_fits_is_suggested(usable_gib: int, changes: tuple[str, ...]) -> None:
    training = {"perDeviceTrainBatchSize": 4, "gradientAccumulationSteps": 1}
    job = parse_spec(length=2048, numNodes=1, nprocPerNode=1, training=training)

    suggestion = suggest_changes(job, fake_forecast, usable_bytes=usable_gib * GIB)

    assert suggestion is not None
    assert suggestion.changes == changes
    assert suggestion.forecast.rank.total <= usable_gib * GIB


@pytest.mark.parametrize(
    ("usable_gib", "fields", "change"),
    [
        pytest.param(12, {}, "deepspeed: {preset: zero2}", id="shard gradients"),
        pytest.param(4, {}, "deepspeed: {preset: zero3}", id="shard weights"),
        pytest.param(4, {"deepspeed": {"preset": "zero1"}}, "deepspeed: {preset: zero3}", id="shard more than zero1"),
        pytest.param(2, {"lora": {}}, "deepspeed: {preset: zero3}", id="shard the frozen weights"),
        pytest.param(12, {"fsdp": {}}, "lora: {}", id="already sharded by fsdp"),
    ],
)
def test_more_sharding_is_suggested_before_lora(usable_gib: int, fields: dict[str, Any], change: str) -> None:
    training = {"perDeviceTrainBatchSize": 1, "gradientAccumulationSteps": 4, "gradientCheckpointing": True}
    job = parse_spec(nprocPerNode=2, training=training, **fields)

    suggestion = suggest_changes(job, fake_forecast, usable_bytes=usable_gib * GIB)

    assert suggestion is not None
    assert suggestion.changes == (change,)


def test_shorter_samples_are_not_suggested_for_a_vision_language_model() -> None:
    def forecast_multimodal(spec: TrainerSpec) -> Forecast:
        return replace(fake_forecast(spec), is_multimodal=True)

    job = parse_spec(length=2048, numNodes=1, nprocPerNode=1)

    assert suggest_changes(job, forecast_multimodal, usable_bytes=2 * GIB) is None


def test_quantization_is_not_suggested_for_sharded_weights() -> None:
    job = parse_spec(length=512, nprocPerNode=2, lora={}, deepspeed={"preset": "zero3_offload"})

    assert suggest_changes(job, fake_forecast, usable_bytes=GIB // 4) is None


def test_no_change_is_suggested_if_none_fits() -> None:
    assert suggest_changes(parse_spec(length=2048), fake_forecast, usable_bytes=1 * GIB) is None


def test_fitting_gpus_are_sorted_by_memory() -> None:
    names = find_fitting_gpus(40 * GIB)

    assert names[0] == "l40s-48g"
    assert [USABLE_BYTES[name] for name in names] == sorted(USABLE_BYTES[name] for name in names)


@pytest.mark.parametrize(
    ("usable_gib", "sizes"),
    [
        pytest.param(160, (8, 1), id="every size fits"),
        pytest.param(40, (2, 4), id="some sizes fit"),
        pytest.param(1, (1, 8), id="no size fits"),
    ],
)
def test_auto_batch_size_is_the_largest_that_fits_the_gpu(usable_gib: int, sizes: tuple[int, int]) -> None:
    job = parse_spec(length=2048, training={"perDeviceTrainBatchSize": "auto", "globalBatchSize": 32})

    training = choose_batch_size(job, fake_forecast, usable_bytes=usable_gib * GIB).training

    assert (training.per_device_train_batch_size, training.gradient_accumulation_steps) == sizes


def test_moments_in_8_bits_need_less_memory_except_for_embeddings() -> None:
    in_float32, in_8_bits = (
        forecast_part_bytes(parse_spec(training={"optim": optim})) for optim in ("adamw_torch_fused", "adamw_8bit")
    )
    embeddings = 2 * 500 * 64 * 4

    assert in_8_bits["weights"] == in_float32["weights"]
    assert in_8_bits["optimizer states"] > embeddings
    assert in_8_bits["optimizer states"] - embeddings < 0.35 * (in_float32["optimizer states"] - embeddings)
