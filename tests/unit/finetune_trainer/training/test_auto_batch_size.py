"""perDeviceTrainBatchSize auto: what is chosen by forecast, what is kept for the next attempt, what room is kept."""

import json
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from finetune_api.batch import Batch
from finetune_api.v1alpha1.job import TrainerSpec
from finetune_trainer.checkpoint.output_folder import Output
from finetune_trainer.errors import ModelError, OutputError
from finetune_trainer.memory.breakdown import Part, Parts
from finetune_trainer.memory.gpus import GIB
from finetune_trainer.training.auto_batch_size import (
    Choice,
    Kept,
    choose_by_forecast,
    circumstances,
    is_measurable,
    keep_room,
)
from testing.builders.jobs import spec as build_spec

SMALLEST = Batch(1, 8, 2)
CPU = torch.device("cpu")
GPU = torch.device("cuda", 0)
HERE = {"worldSize": 2, "device": "cpu", "parallelism": "ddp", "gradientCheckpointing": False}


def two_gib_a_sample(batch: Batch) -> Parts:
    return Parts((Part("weights", 3 * GIB), Part("activations", 2 * GIB * batch.per_device)))


def spec(**fields: Any) -> TrainerSpec:
    return TrainerSpec.model_validate(build_spec(**fields))


@pytest.mark.parametrize(
    ("available", "chosen", "why"),
    [
        pytest.param(
            12, Batch(4, 2, 2), "forecast to need 11.00 of 12.00 GiB of a rank, 8 would need 19.00", id="some fit"
        ),
        pytest.param(
            20, Batch(8, 1, 2), "forecast to need 19.00 of 20.00 GiB of a rank; it is all that a rank has", id="all fit"
        ),
        pytest.param(4, SMALLEST, "even that is forecast to need 5.00 of 4.00 GiB of a rank", id="none fits"),
    ],
)
def test_as_many_samples_as_are_forecast_to_fit(available: int, chosen: Batch, why: str) -> None:
    assert choose_by_forecast(SMALLEST, two_gib_a_sample, available=available * GIB) == Choice(chosen, why)


@given(samples=st.integers(1, 5000), available=st.integers(0, 12_000 * GIB))
def test_the_next_size_is_too_much(samples: int, available: int) -> None:
    smallest = Batch(1, samples, 2)

    chosen = choose_by_forecast(smallest, two_gib_a_sample, available=available).batch

    larger = [size for size in range(chosen.per_device + 1, samples + 1) if samples % size == 0]
    assert chosen.effective == smallest.effective
    assert chosen == smallest or two_gib_a_sample(chosen).total <= available
    assert all(two_gib_a_sample(Batch(size, samples // size, 2)).total > available for size in larger)


def test_what_cannot_be_forecast_is_one_sample_at_a_time() -> None:
    unknown = ModelError("what images cost is not simulated")

    assert choose_by_forecast(SMALLEST, lambda _batch: unknown, available=GIB) == Choice(
        SMALLEST, "what more would need cannot be forecast: what images cost is not simulated"
    )


@pytest.mark.parametrize(
    ("fields", "device", "measurable"),
    [
        pytest.param({}, GPU, True, id="gpu"),
        pytest.param({}, CPU, False, id="cpu"),
        pytest.param({"deepspeed": {"preset": "zero2"}}, GPU, False, id="deepspeed"),
        pytest.param({"fsdp": {}}, GPU, False, id="fsdp"),
    ],
)
def test_only_whole_models_on_gpus_are_tried(fields: dict[str, Any], device: torch.device, measurable: bool) -> None:
    assert is_measurable(spec(**fields), device) is measurable


@pytest.fixture
def held(output: Output) -> Output:
    output.claim(overwrite=False)
    return output


def test_the_next_attempt_takes_the_same_size(held: Output) -> None:
    Kept(held, HERE).keep(Choice(Batch(4, 2, 2), "it fitted"))

    assert Kept(held, HERE).find(SMALLEST) == Choice(Batch(4, 2, 2), "as in an attempt before")


@pytest.mark.parametrize(
    "changed",
    [
        pytest.param({"worldSize": 4}, id="ranks"),
        pytest.param({"device": "NVIDIA L4"}, id="device"),
        pytest.param({"parallelism": "deepspeed zero2"}, id="parallelism"),
        pytest.param({"gradientCheckpointing": True}, id="checkpointing"),
    ],
)
def test_under_other_circumstances_it_is_chosen_anew(held: Output, changed: dict[str, Any]) -> None:
    Kept(held, HERE).keep(Choice(Batch(4, 2, 2), "it fitted"))

    assert Kept(held, {**HERE, **changed}).find(SMALLEST) is None


@pytest.mark.parametrize("text", ["", "{}", "[]", json.dumps({"circumstances": HERE, "perDevice": 3})])
def test_a_file_that_says_nothing_of_use_is_passed_over(held: Output, text: str) -> None:
    (held.checkpoints / "batch.json").write_text(text)

    assert Kept(held, HERE).find(SMALLEST) is None


def test_an_attempt_that_was_superseded_keeps_nothing(held: Output) -> None:
    held.job_file.write_text(json.dumps({"uid": held.identity.uid, "attempt": held.identity.attempt + 1}))

    with pytest.raises(OutputError, match="superseded"):
        Kept(held, HERE).keep(Choice(SMALLEST, "it fitted"))

    assert Kept(held, HERE).find(SMALLEST) is None


def test_circumstances_are_what_memory_depends_on() -> None:
    checkpointed = spec(training={"gradientCheckpointing": True}, fsdp={})

    assert circumstances(spec(), CPU, world_size=2) == HERE
    assert circumstances(checkpointed, CPU, world_size=2) == {
        **HERE,
        "parallelism": "fsdp2",
        "gradientCheckpointing": True,
    }


@pytest.mark.parametrize(("world_size", "copies"), [pytest.param(1, 2, id="alone"), pytest.param(2, 3, id="ddp")])
def test_room_is_kept_for_what_comes_with_the_steps(world_size: int, copies: int) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    model[1].requires_grad_(requires_grad=False)

    room = keep_room(model, CPU, world_size=world_size)

    trained = sum(parameter.nbytes for parameter in model[0].parameters())
    assert sum(tensor.nbytes for tensor in room) == copies * trained
    assert all((parameter.grad is not None) == parameter.requires_grad for parameter in model.parameters())
