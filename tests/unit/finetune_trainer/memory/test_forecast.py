"""From a job's spec to the sums of its ranks and nodes, and to what should change if they are too large."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import BloomConfig, Qwen2Config

from finetune_api.v1alpha1.job import TrainerSpec
from finetune_trainer.errors import InvalidSpec
from finetune_trainer.memory.breakdown import Part, Parts
from finetune_trainer.memory.forecast import Forecast, Model, forecast
from finetune_trainer.memory.gpus import GIB, USABLE_BYTES, names_that_fit
from finetune_trainer.memory.model_shape import ModelShape
from finetune_trainer.memory.suggestions import choose_size, suggest
from finetune_trainer.training_arguments import plan_batch
from testing.builders import jobs as builders

TINY = Model(
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


def spec(*, length: int | None = 64, **fields: Any) -> TrainerSpec:
    dataset = {"train": [{"name": "/data/train.jsonl"}], "maxLength": length}
    return TrainerSpec.model_validate({**builders.spec(lora=None, dataset=dataset), **fields})


def parts(spec: TrainerSpec, *, node: bool = False) -> dict[str, int]:
    found = forecast(spec, TINY, on_gpu=True)
    return {part.name: part.size for part in (found.node if node else found.rank).parts}


def test_a_pair_takes_what_two_samples_take() -> None:
    two = spec(lora={}, training={"perDeviceTrainBatchSize": 2})

    assert parts(spec(lora={}, sft=None, dpo={})) == parts(two)


def test_full_tuning_by_preferences_holds_a_second_model_in_its_own_type() -> None:
    sft, dpo = parts(spec()), parts(spec(sft=None, dpo={}))

    assert "reference model" not in sft
    assert dpo["reference model"] == pytest.approx(dpo["weights"] / 2, rel=0.001)


def test_every_rank_of_a_node_reads_both_models() -> None:
    rows = {"train": [{"name": "/data/train.jsonl"}], "numWorkers": 0}
    sft, dpo = parts(spec(dataset=rows), node=True), parts(spec(dataset=rows, sft=None, dpo={}), node=True)

    assert dpo["weights being loaded"] == pytest.approx(1.5 * sft["weights being loaded"], rel=0.001)


def test_samples_are_as_long_as_the_model_allows_unless_the_job_says_less() -> None:
    assert forecast(spec(length=None), TINY, on_gpu=True).length == 256
    assert forecast(spec(length=64), TINY, on_gpu=True).length == 64


def test_a_model_that_names_no_length_needs_one() -> None:
    with pytest.raises(InvalidSpec, match=r"spec.dataset.maxLength: .* set it, or memory cannot be forecast"):
        forecast(spec(length=None), Model(BloomConfig(), torch.bfloat16), on_gpu=True)


def test_a_larger_batch_of_evaluation_counts() -> None:
    rows = {"train": [{"name": "/data/a.jsonl"}], "eval": [{"name": "/data/b.jsonl"}], "maxLength": 64}
    few, many = (
        forecast(
            spec(dataset=rows, training={"perDeviceTrainBatchSize": 1, "perDeviceEvalBatchSize": size}),
            TINY,
            on_gpu=True,
        ).rank.total
        for size in (1, 64)
    )

    assert many > few


def rule_of_thumb(spec: TrainerSpec) -> Forecast:
    """A forecast without a model: 20 GiB for all weights, 4 with adapters, 1 of 4 bits; 4 GiB per 1024 tokens.

    zero2 halves what is held, zero3 leaves an eighth of it.
    """
    batch, length = plan_batch(spec, world_size=spec.world_size), spec.dataset.max_length or 2048
    per_sample = 4 * GIB * length // 1024 // (4 if spec.training.gradient_checkpointing else 1)
    held = (20 if spec.lora is None else 1 if spec.lora.quantization else 4) * GIB
    if spec.deepspeed and spec.deepspeed.preset != "zero1":
        held //= 2 if spec.deepspeed.preset == "zero2" else 8
    parts = Parts((Part("held", held), Part("samples", batch.per_device * per_sample)))
    return Forecast(ModelShape(0, 0, 0, 0, 0), batch, length, parts, parts, on_gpu=True)


@pytest.mark.parametrize(
    ("usable", "changes"),
    [
        pytest.param(40, ("training.gradientCheckpointing: true",), id="recompute"),
        pytest.param(
            24,
            (
                "training.gradientCheckpointing: true",
                "training.perDeviceTrainBatchSize: 2, training.gradientAccumulationSteps: 2",
            ),
            id="recompute in smaller batches",
        ),
        pytest.param(12, ("training.gradientCheckpointing: true", "lora: {}"), id="adapters"),
        pytest.param(
            4,
            (
                "training.gradientCheckpointing: true",
                "training.perDeviceTrainBatchSize: 1, training.gradientAccumulationSteps: 4",
                "lora: {}",
                "lora.quantization: nf4",
            ),
            id="adapters on 4 bits",
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
def test_the_cheapest_change_that_fits_is_suggested(usable: int, changes: tuple[str, ...]) -> None:
    training = {"perDeviceTrainBatchSize": 4, "gradientAccumulationSteps": 1}
    job = spec(length=2048, numNodes=1, nprocPerNode=1, training=training)

    found = suggest(job, rule_of_thumb, usable_bytes=usable * GIB)

    assert found is not None
    assert found.changes == changes
    assert found.forecast.rank.total <= usable * GIB


@pytest.mark.parametrize(
    ("usable", "fields", "change"),
    [
        pytest.param(12, {}, "deepspeed: {preset: zero2}", id="gradients spread"),
        pytest.param(4, {}, "deepspeed: {preset: zero3}", id="weights spread"),
        pytest.param(4, {"deepspeed": {"preset": "zero1"}}, "deepspeed: {preset: zero3}", id="more than before"),
        pytest.param(2, {"lora": {}}, "deepspeed: {preset: zero3}", id="the frozen model spread"),
        pytest.param(12, {"fsdp": {}}, "lora: {}", id="spread in another way"),
    ],
)
def test_several_ranks_spread_before_anything_else_is_learned(usable: int, fields: dict[str, Any], change: str) -> None:
    training = {"perDeviceTrainBatchSize": 1, "gradientAccumulationSteps": 4, "gradientCheckpointing": True}

    found = suggest(spec(nprocPerNode=2, training=training, **fields), rule_of_thumb, usable_bytes=usable * GIB)

    assert found is not None
    assert found.changes == (change,)


def test_samples_with_images_do_not_become_shorter() -> None:
    def seeing(spec: TrainerSpec) -> Forecast:
        return replace(rule_of_thumb(spec), sees=True)

    assert suggest(spec(length=2048, numNodes=1, nprocPerNode=1), seeing, usable_bytes=2 * GIB) is None


def test_spread_weights_are_not_put_into_four_bits() -> None:
    job = spec(length=512, nprocPerNode=2, lora={}, deepspeed={"preset": "zero3_offload"})

    assert suggest(job, rule_of_thumb, usable_bytes=GIB // 4) is None


def test_what_nothing_makes_fit_has_no_suggestion() -> None:
    assert suggest(spec(length=2048), rule_of_thumb, usable_bytes=1 * GIB) is None


def test_gpus_that_fit_are_named_smallest_first() -> None:
    names = names_that_fit(40 * GIB)

    assert names[0] == "l40s-48g"
    assert [USABLE_BYTES[name] for name in names] == sorted(USABLE_BYTES[name] for name in names)


@pytest.mark.parametrize(
    ("usable", "sizes"),
    [pytest.param(160, (8, 1), id="all"), pytest.param(40, (2, 4), id="some"), pytest.param(1, (1, 8), id="none")],
)
def test_auto_is_as_much_as_fits_the_gpu(usable: int, sizes: tuple[int, int]) -> None:
    job = spec(length=2048, training={"perDeviceTrainBatchSize": "auto", "globalBatchSize": 32})

    found = choose_size(job, rule_of_thumb, usable_bytes=usable * GIB).training

    assert (found.per_device_train_batch_size, found.gradient_accumulation_steps) == sizes
