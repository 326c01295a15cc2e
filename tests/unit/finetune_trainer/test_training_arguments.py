"""Test the TrainingArguments of a training plan."""

import os
from pathlib import Path

import pytest
import torch

from finetune_trainer.cgroup import Cgroup
from finetune_trainer.distributed.rank_context import Ranks
from finetune_trainer.training_arguments import (
    DeviceConfig,
    build_training_arguments,
    choose_loader_workers,
    count_cpus,
)
from finetune_trainer.training_plan import plan_training
from testing.builders.jobs import parse_spec


@pytest.mark.usefixtures("process_group")
def test_training_fields_of_the_spec_are_passed_as_training_arguments(tmp_path: Path) -> None:
    spec = parse_spec(
        training={
            "perDeviceTrainBatchSize": 2,
            "gradientAccumulationSteps": 4,
            "lrSchedulerType": "polynomial",
            "warmupSteps": 3,
            "weightDecay": 0.25,
            "adamBeta1": 0.8,
            "adamBeta2": 0.95,
            "adamEpsilon": 1e-6,
            "maxGradNorm": 0.5,
            "gradientCheckpointing": True,
            "gradientCheckpointingInterval": 3,
            "seed": 7,
            "loggingSteps": 2,
            "saveSteps": 11,
            "ddpTimeout": 99,
            "averageTokensAcrossDevices": False,
        }
    )
    plan = plan_training(spec, world_size=1).with_samples(10)

    args = build_training_arguments(
        plan, DeviceConfig(torch.device("cpu"), torch.bfloat16), checkpoint_folder=tmp_path, loader_workers=3
    )

    assert args.lr_scheduler_type == "polynomial"
    assert (args.warmup_steps, args.weight_decay, args.max_grad_norm) == (3, 0.25, 0.5)
    assert (args.adam_beta1, args.adam_beta2, args.adam_epsilon) == (0.8, 0.95, 1e-6)
    assert args.activation_checkpointing_kwargs == {"use_reentrant": False, "every_n_layers": 3}
    assert (args.activation_checkpointing, args.seed, args.logging_steps, args.save_steps) == (True, 7, 2, 11)
    assert (args.ddp_timeout, args.average_tokens_across_devices, args.dataloader_num_workers) == (99, False, 3)
    assert (args.per_device_train_batch_size, args.gradient_accumulation_steps) == (2, 4)
    assert (args.bf16, args.fp16, args.max_steps, args.optim) == (True, False, 6, "adamw_torch_fused")


@pytest.mark.parametrize(
    ("planned", "quota", "cpus"),
    [
        pytest.param(None, "max 100000", 3.0, id="affinity"),
        pytest.param(None, "150000 100000", 1.5, id="quota of the container"),
        pytest.param(2.0, "max 100000", 2.0, id="request of the pod"),
        pytest.param(64.0, "max 100000", 3.0, id="request above the affinity"),
    ],
)
def test_cpus_are_the_lowest_of_affinity_quota_and_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, planned: float | None, quota: str, cpus: float
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2})
    (tmp_path / "cpu.max").write_text(quota)

    assert count_cpus(planned, Cgroup(tmp_path, tmp_path / "no file")) == cpus


@pytest.mark.parametrize(
    ("cpus", "local_ranks", "workers"),
    [
        pytest.param(96.0, 8, 8, id="at most eight"),
        pytest.param(16.0, 4, 3, id="one CPU for the rank itself"),
        pytest.param(16.0, 8, 1, id="two CPUs per rank"),
        pytest.param(1.5, 8, 1, id="at least one"),
    ],
)
def test_loader_workers_share_the_cpus_with_all_ranks(cpus: float, local_ranks: int, workers: int) -> None:
    ranks = Ranks(rank=0, local_rank=0, local_world_size=local_ranks, world_size=local_ranks)

    assert choose_loader_workers(parse_spec(), ranks, cpus=cpus) == workers


def test_loader_workers_of_the_spec_are_used_with_any_number_of_cpus() -> None:
    spec = parse_spec(dataset={"train": [{"name": "/data/train.jsonl"}], "numWorkers": 5})

    assert choose_loader_workers(spec, Ranks(0, 0, 1, 1), cpus=1.0) == 5
