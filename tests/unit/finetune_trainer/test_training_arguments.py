"""Test the TrainingArguments of a training plan."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from finetune_api.v1alpha1.job import TrainerSpec
from finetune_trainer.training_arguments import DeviceConfig, build_training_arguments
from finetune_trainer.training_plan import plan_training
from testing.builders.jobs import spec as build_spec


@pytest.fixture
def process_group() -> Iterator[None]:
    """Initialise the process group that accelerate needs."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("process_group")
def test_training_fields_of_the_spec_are_passed_as_training_arguments(tmp_path: Path) -> None:
    spec = build_spec(
        training={
            "perDeviceTrainBatchSize": 2,
            "gradientAccumulationSteps": 4,
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
    plan = plan_training(TrainerSpec.model_validate(spec), world_size=1).with_samples(10)

    args = build_training_arguments(
        plan,
        DeviceConfig(torch.device("cpu"), torch.bfloat16),
        checkpoint_folder=tmp_path,
        loader_workers=3,
    )

    assert args.lr_scheduler_type == "polynomial"
    assert (args.warmup_steps, args.weight_decay, args.max_grad_norm) == (3, 0.25, 0.5)
    assert (args.activation_checkpointing, args.seed, args.logging_steps, args.save_steps) == (True, 7, 2, 11)
    assert (args.ddp_timeout, args.average_tokens_across_devices, args.dataloader_num_workers) == (99, False, 3)
    assert (args.per_device_train_batch_size, args.gradient_accumulation_steps) == (2, 4)
    assert (args.bf16, args.fp16, args.max_steps) == (True, False, 6)
