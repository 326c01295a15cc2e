"""The training plan: spec, batch, schedule, fingerprint and the arguments of transformers."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from finetune_api.batch import Batch
from finetune_api.v1alpha1.job import METHODS, TrainerSpec
from finetune_trainer.build_trainer import BUILDERS
from finetune_trainer.errors import InvalidSpec
from finetune_trainer.training_arguments import (
    DeviceConfig,
    build_training_arguments,
    compute_fingerprint,
    plan_batch,
    plan_schedule,
    read_spec,
)


def spec(**fields: Any) -> TrainerSpec:
    return TrainerSpec.model_validate(spec_body(**fields))


def spec_body(**fields: Any) -> dict[str, Any]:
    return {
        "model": {"name": "/models/tiny"},
        "dataset": {"train": [{"name": "/data/train.jsonl"}]},
        "sft": {},
        "output": {"persistentVolumeClaim": {"claimName": "models"}},
        **fields,
    }


def fingerprint_of(**fields: Any) -> str:
    parsed = spec(**fields)
    return compute_fingerprint(parsed, plan_batch(parsed, world_size=2))


def test_every_training_method_of_the_api_has_a_builder() -> None:
    assert set(BUILDERS) == set(METHODS)


@pytest.mark.parametrize(
    ("training", "total_steps"),
    [
        pytest.param({}, 39, id="three epochs by default"),
        pytest.param({"numTrainEpochs": 0.5}, 7, id="half an epoch"),
        pytest.param({"maxSteps": 5}, 5, id="maxSteps"),
    ],
)
def test_an_epoch_ends_with_an_incomplete_step(training: dict[str, Any], total_steps: int) -> None:
    schedule = plan_schedule(spec(training=training), Batch(8, 1, 1), samples=100)

    assert schedule.steps_per_epoch == 13
    assert schedule.total_steps == total_steps


def test_layouts_with_the_same_effective_batch_have_the_same_fingerprint() -> None:
    one_micro_batch = fingerprint_of(training={"globalBatchSize": 8, "perDeviceTrainBatchSize": 4})
    accumulated = fingerprint_of(training={"perDeviceTrainBatchSize": 1, "gradientAccumulationSteps": 4})

    assert one_micro_batch == accumulated


def test_fields_that_do_not_change_the_result_are_not_in_the_fingerprint() -> None:
    without_effect = {"loggingSteps": 5, "saveSteps": 7, "ddpTimeout": 60, "probe": True, "allowMixedHardware": True}

    assert fingerprint_of() == fingerprint_of(training=without_effect, numNodes=2)


@pytest.mark.parametrize(
    "changed",
    [
        pytest.param({"training": {"seed": 1}}, id="seed"),
        pytest.param({"training": {"globalBatchSize": 8}}, id="effective batch"),
        pytest.param({"training": {"averageTokensAcrossDevices": False}}, id="averaging"),
        pytest.param({"lora": {}}, id="lora"),
        pytest.param({"model": {"name": "/models/other"}}, id="model"),
        pytest.param({"dataset": {"train": [{"name": "/data/other.jsonl"}]}}, id="dataset"),
    ],
)
def test_fields_that_change_the_result_are_in_the_fingerprint(changed: dict[str, Any]) -> None:
    assert fingerprint_of(**changed) != fingerprint_of()


def test_the_error_about_an_invalid_spec_names_every_invalid_field(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(spec_body(training={"seed": "x", "maxSteps": 0})))

    with pytest.raises(InvalidSpec) as raised:
        read_spec(path)

    assert "spec.training.seed:" in str(raised.value)
    assert "spec.training.maxSteps:" in str(raised.value)


def test_warmup_steps_with_a_constant_schedule_are_rejected(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(spec_body(training={"lrSchedulerType": "constant", "warmupSteps": 5})))

    with pytest.raises(InvalidSpec, match="use constant_with_warmup"):
        read_spec(path)


@pytest.fixture
def process_group() -> Iterator[None]:
    """TrainingArguments initialises accelerate, which needs a process group."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("process_group")
def test_training_fields_of_the_spec_become_training_arguments(tmp_path: Path) -> None:
    parsed = spec(
        training={
            "lrSchedulerType": "polynomial",
            "warmupSteps": 3,
            "weightDecay": 0.25,
            "maxGradNorm": 0.5,
            "gradientCheckpointing": True,
            "seed": 7,
            "loggingSteps": 2,
            "saveSteps": 11,
            "ddpTimeout": 99,
            "averageTokensAcrossDevices": False,
        }
    )
    batch = Batch(2, 4, 1)

    args = build_training_arguments(
        parsed,
        batch,
        plan_schedule(parsed, batch, samples=10),
        DeviceConfig(torch.device("cpu"), torch.bfloat16),
        folder=tmp_path,
        workers=3,
    )

    assert args.lr_scheduler_type == "polynomial"
    assert (args.warmup_steps, args.weight_decay, args.max_grad_norm) == (3, 0.25, 0.5)
    assert (args.activation_checkpointing, args.seed, args.logging_steps, args.save_steps) == (True, 7, 2, 11)
    assert (args.ddp_timeout, args.average_tokens_across_devices, args.dataloader_num_workers) == (99, False, 3)
    assert (args.per_device_train_batch_size, args.gradient_accumulation_steps) == (2, 4)
    assert (args.bf16, args.fp16, args.max_steps) == (True, False, 6)
