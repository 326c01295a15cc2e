"""Test how perDeviceTrainBatchSize auto is resolved, saved and reused."""

import json
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from finetune_api.batch import Batch
from finetune_trainer.checkpoint.output_folder import OutputFolder
from finetune_trainer.errors import ModelError, OutputError
from finetune_trainer.memory.breakdown import MemoryBreakdown, MemoryPart
from finetune_trainer.training.auto_batch_size import (
    BatchChoice,
    SavedBatchSize,
    build_cache_key,
    can_run_batch_size_trial,
    choose_by_forecast,
    reserve_training_memory,
)
from finetune_trainer.units import GIB
from testing.builders.jobs import parse_spec

SMALLEST = Batch(1, 8, 2)
CPU = torch.device("cpu")
GPU = torch.device("cuda", 0)
CACHE_KEY = {"worldSize": 2, "device": "cpu", "parallelism": "ddp", "recomputationInterval": None}


def forecast_two_gib_per_sample(batch: Batch) -> MemoryBreakdown:
    return MemoryBreakdown(
        (MemoryPart("weights", 3 * GIB), MemoryPart("activations", 2 * GIB * batch.micro_batch_size))
    )


@pytest.mark.parametrize(
    ("available_gib", "chosen_batch", "reason"),
    [
        pytest.param(
            12, Batch(4, 2, 2), "forecast to need 11.00 of 12.00 GiB per rank, 8 would need 19.00", id="some sizes fit"
        ),
        pytest.param(
            20,
            Batch(8, 1, 2),
            "forecast to need 19.00 of 20.00 GiB per rank; it is the largest possible size",
            id="all sizes fit",
        ),
        pytest.param(4, SMALLEST, "even this is forecast to need 5.00 of 4.00 GiB per rank", id="no size fits"),
    ],
)
def test_largest_micro_batch_that_fits_is_chosen(available_gib: int, chosen_batch: Batch, reason: str) -> None:
    choice = choose_by_forecast(SMALLEST, forecast_two_gib_per_sample, available_bytes=available_gib * GIB)

    assert choice == BatchChoice(chosen_batch, reason)


@given(samples=st.integers(1, 5000), available_bytes=st.integers(0, 12_000 * GIB))
def test_no_larger_micro_batch_than_the_chosen_one_fits(samples: int, available_bytes: int) -> None:
    smallest_batch = Batch(1, samples, 2)

    chosen_batch = choose_by_forecast(
        smallest_batch, forecast_two_gib_per_sample, available_bytes=available_bytes
    ).batch

    larger_sizes = [size for size in range(chosen_batch.micro_batch_size + 1, samples + 1) if samples % size == 0]
    assert chosen_batch.effective == smallest_batch.effective
    assert chosen_batch == smallest_batch or forecast_two_gib_per_sample(chosen_batch).total <= available_bytes
    assert all(
        forecast_two_gib_per_sample(Batch(size, samples // size, 2)).total > available_bytes for size in larger_sizes
    )


def test_smallest_batch_is_chosen_without_a_forecast() -> None:
    error = ModelError("images cannot be simulated")

    assert choose_by_forecast(SMALLEST, lambda _batch: error, available_bytes=GIB) == BatchChoice(
        SMALLEST, "the memory of larger sizes cannot be forecast: images cannot be simulated"
    )


@pytest.mark.parametrize(
    ("fields", "device", "is_measurable"),
    [
        pytest.param({}, GPU, True, id="gpu"),
        pytest.param({}, CPU, False, id="cpu"),
        pytest.param({"deepspeed": {"preset": "zero2"}}, GPU, False, id="deepspeed"),
        pytest.param({"fsdp": {}}, GPU, False, id="fsdp"),
    ],
)
def test_batch_sizes_are_tried_only_on_gpus_without_sharding(
    fields: dict[str, Any], device: torch.device, is_measurable: bool
) -> None:
    assert can_run_batch_size_trial(parse_spec(**fields), device) is is_measurable


def test_next_attempt_reuses_the_saved_batch_size(output: OutputFolder) -> None:
    SavedBatchSize(output, CACHE_KEY).save(BatchChoice(Batch(4, 2, 2), "it fits"))

    loaded_choice = SavedBatchSize(output, CACHE_KEY).load(SMALLEST)
    assert loaded_choice == BatchChoice(Batch(4, 2, 2), "as in an earlier attempt")


@pytest.mark.parametrize(
    "changed_fields",
    [
        pytest.param({"worldSize": 4}, id="ranks"),
        pytest.param({"device": "NVIDIA L4"}, id="device"),
        pytest.param({"parallelism": "deepspeed zero2"}, id="parallelism"),
        pytest.param({"gradientCheckpointing": True}, id="gradient checkpointing"),
    ],
)
def test_saved_batch_size_is_ignored_if_the_cache_key_changed(
    output: OutputFolder, changed_fields: dict[str, Any]
) -> None:
    SavedBatchSize(output, CACHE_KEY).save(BatchChoice(Batch(4, 2, 2), "it fits"))

    assert SavedBatchSize(output, {**CACHE_KEY, **changed_fields}).load(SMALLEST) is None


@pytest.mark.parametrize(
    "content", ["", "{}", "[]", "[" * 10_000, json.dumps({"circumstances": CACHE_KEY, "perDevice": 3})]
)
def test_invalid_batch_size_file_is_ignored(output: OutputFolder, content: str) -> None:
    (output.checkpoints / "batch.json").write_text(content)

    assert SavedBatchSize(output, CACHE_KEY).load(SMALLEST) is None


def test_superseded_attempt_cannot_save_a_batch_size(output: OutputFolder) -> None:
    identity = output.identity
    output.job_file.write_text(json.dumps({"uid": identity.uid, "attempt": identity.attempt + 1}))

    with pytest.raises(OutputError, match="superseded"):
        SavedBatchSize(output, CACHE_KEY).save(BatchChoice(SMALLEST, "it fits"))

    assert SavedBatchSize(output, CACHE_KEY).load(SMALLEST) is None


def test_cache_key_contains_settings_that_affect_memory_use() -> None:
    checkpointing_spec = parse_spec(training={"gradientCheckpointing": True}, fsdp={})

    assert build_cache_key(parse_spec(), CPU, world_size=2) == CACHE_KEY
    assert build_cache_key(checkpointing_spec, CPU, world_size=2) == {
        **CACHE_KEY,
        "parallelism": "fsdp2",
        "recomputationInterval": 1,
    }


@pytest.mark.parametrize(
    ("world_size", "expected_copies"), [pytest.param(1, 2, id="one rank"), pytest.param(2, 3, id="two ranks with ddp")]
)
def test_memory_is_reserved_for_optimizer_states_and_ddp_buckets(world_size: int, expected_copies: int) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    model[1].requires_grad_(requires_grad=False)

    reserved_tensors = reserve_training_memory(model, CPU, world_size=world_size)

    trained_bytes = sum(parameter.nbytes for parameter in model[0].parameters())
    assert sum(tensor.nbytes for tensor in reserved_tensors) == expected_copies * trained_bytes
    assert all((parameter.grad is not None) == parameter.requires_grad for parameter in model.parameters())


def test_moments_in_8_bits_reserve_less_memory() -> None:
    model = torch.nn.Linear(256, 256, bias=False)

    reserved_tensors = reserve_training_memory(model, CPU, world_size=1, has_eight_bit_moments=True)

    assert sum(tensor.nbytes for tensor in reserved_tensors) == 2 * (256 * 256 + 4 * 256)
