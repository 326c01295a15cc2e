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
    Hardware,
    fingerprint,
    plan_batch,
    plan_schedule,
    read_spec,
    training_arguments,
)


def spec(**fields: Any) -> TrainerSpec:
    return TrainerSpec.model_validate(raw(**fields))


def raw(**fields: Any) -> dict[str, Any]:
    return {
        "model": {"name": "/models/tiny"},
        "dataset": {"train": [{"name": "/data/train.jsonl"}]},
        "sft": {},
        "output": {"persistentVolumeClaim": {"claimName": "models"}},
        **fields,
    }


def print_of(**fields: Any) -> str:
    made = spec(**fields)
    return fingerprint(made, plan_batch(made, world_size=2))


def test_every_method_of_the_contract_has_a_builder() -> None:
    assert set(BUILDERS) == set(METHODS)


@pytest.mark.parametrize(
    ("training", "total"),
    [({}, 39), ({"numTrainEpochs": 0.5}, 7), ({"maxSteps": 5}, 5)],
    ids=["three epochs", "half an epoch", "given steps"],
)
def test_the_last_step_of_an_epoch_takes_what_is_left(training: dict[str, Any], total: int) -> None:
    schedule = plan_schedule(spec(training=training), Batch(8, 1, 1), samples=100)

    assert schedule.steps_per_epoch == 13
    assert schedule.total_steps == total


def test_layouts_of_one_effective_batch_share_a_fingerprint() -> None:
    together = print_of(training={"globalBatchSize": 8, "perDeviceTrainBatchSize": 4})
    accumulated = print_of(training={"perDeviceTrainBatchSize": 1, "gradientAccumulationSteps": 4})

    assert together == accumulated


def test_what_only_watches_or_saves_is_not_in_the_fingerprint() -> None:
    watched = {"loggingSteps": 5, "saveSteps": 7, "ddpTimeout": 60, "probe": True, "allowMixedHardware": True}

    assert print_of() == print_of(training=watched, numNodes=2)


@pytest.mark.parametrize(
    "changed",
    [
        {"training": {"seed": 1}},
        {"training": {"globalBatchSize": 8}},
        {"training": {"averageTokensAcrossDevices": False}},
        {"lora": {}},
        {"model": {"name": "/models/other"}},
        {"dataset": {"train": [{"name": "/data/other.jsonl"}]}},
    ],
    ids=str,
)
def test_what_is_trained_is_in_the_fingerprint(changed: dict[str, Any]) -> None:
    assert print_of(**changed) != print_of()


def test_a_broken_spec_is_told_field_by_field(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(raw(training={"seed": "x", "maxSteps": 0})))

    with pytest.raises(InvalidSpec) as raised:
        read_spec(path)

    assert "spec.training.seed:" in str(raised.value)
    assert "spec.training.maxSteps:" in str(raised.value)


def test_a_warm_up_that_would_be_ignored_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(raw(training={"lrSchedulerType": "constant", "warmupSteps": 5})))

    with pytest.raises(InvalidSpec, match="use constant_with_warmup"):
        read_spec(path)


@pytest.fixture
def process_group() -> Iterator[None]:
    """TrainingArguments asks for its device, and accelerate for the group, when it is made."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("process_group")
def test_the_spec_reaches_transformers(tmp_path: Path) -> None:
    made = spec(
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

    args = training_arguments(
        made,
        batch,
        plan_schedule(made, batch, samples=10),
        Hardware(torch.device("cpu"), torch.bfloat16),
        folder=tmp_path,
        workers=3,
    )

    assert args.lr_scheduler_type == "polynomial"
    assert (args.warmup_steps, args.weight_decay, args.max_grad_norm) == (3, 0.25, 0.5)
    assert (args.activation_checkpointing, args.seed, args.logging_steps, args.save_steps) == (True, 7, 2, 11)
    assert (args.ddp_timeout, args.average_tokens_across_devices, args.dataloader_num_workers) == (99, False, 3)
    assert (args.per_device_train_batch_size, args.gradient_accumulation_steps) == (2, 4)
    assert (args.bf16, args.fp16, args.max_steps) == (True, False, 6)
