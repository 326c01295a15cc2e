"""Build the transformers TrainingArguments of a training plan, and choose the number of data loader workers."""

import importlib.util
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import TrainingArguments

from finetune_api.v1alpha1.job import TrainerSpec
from finetune_api.v1alpha1.training import EIGHT_BIT_ADAMW
from finetune_trainer.cgroup import Cgroup
from finetune_trainer.distributed.rank_context import Ranks
from finetune_trainer.errors import InvalidSpec
from finetune_trainer.parallel.deepspeed_config import build_deepspeed_config
from finetune_trainer.parallel.fsdp import build_fsdp_config
from finetune_trainer.training_plan import TrainingPlan

MAX_LOADER_WORKERS = 8  # upper limit per rank, unless spec.dataset.numWorkers is set


def choose_loader_workers(spec: TrainerSpec, ranks: Ranks, *, cpus: float) -> int:
    """Return the number of data loader workers per rank: its share of the CPUs minus one for the rank itself."""
    if spec.dataset.num_workers is not None:
        return spec.dataset.num_workers
    return min(MAX_LOADER_WORKERS, max(1, math.floor(cpus / ranks.local_world_size) - 1))


def count_cpus(planned_cpus: float | None, cgroup: Cgroup) -> float:
    """Return the CPUs of this container: the lowest of its affinity, its cgroup quota, and the limit or request."""
    limits = (planned_cpus, cgroup.read_cpu_quota(), float(len(os.sched_getaffinity(0))))
    return min(limit for limit in limits if limit is not None)


@dataclass(frozen=True)
class DeviceConfig:
    """The device of a rank and its compute dtype."""

    device: torch.device
    dtype: torch.dtype


def build_checkpointing_options(interval: int | None) -> dict[str, Any] | None:
    """Return the arguments of transformers that recompute the activations of every n-th layer; None: of no layer."""
    return None if interval is None else {"use_reentrant": False, "every_n_layers": interval}


def build_training_arguments(
    plan: TrainingPlan, device_config: DeviceConfig, *, checkpoint_folder: Path, loader_workers: int
) -> TrainingArguments:
    """Build the arguments of the transformers Trainer.

    loader_workers: data loader processes per rank. Raises: InvalidSpec if a library or option does not fit.
    """
    spec, training, total_steps = plan.spec, plan.spec.training, plan.schedule.total_steps
    if training.optim == EIGHT_BIT_ADAMW and importlib.util.find_spec("bitsandbytes") is None:
        raise InvalidSpec(
            "spec.training.optim: this image has no bitsandbytes, which adamw_8bit needs; use the trainer image of the"
            " operator's release (leave spec.image out), or set adamw_torch_fused"
        )
    on_cpu = device_config.device.type == "cpu"
    return TrainingArguments(
        output_dir=str(checkpoint_folder),
        per_device_train_batch_size=plan.batch.micro_batch_size,
        gradient_accumulation_steps=plan.batch.accumulation_steps,
        average_tokens_across_devices=training.average_tokens_across_devices,
        learning_rate=plan.learning_rates.default_rate,
        lr_scheduler_type=training.lr_scheduler_type,
        warmup_steps=training.warmup_steps,
        optim=training.optim,
        weight_decay=training.weight_decay,
        adam_beta1=training.adam_beta1,
        adam_beta2=training.adam_beta2,
        adam_epsilon=training.adam_epsilon,
        max_grad_norm=training.max_grad_norm,
        max_steps=total_steps,
        activation_checkpointing=training.gradient_checkpointing,
        activation_checkpointing_kwargs=build_checkpointing_options(training.recomputation_interval),
        bf16=device_config.dtype is torch.bfloat16,
        fp16=device_config.dtype is torch.float16,
        seed=training.seed,
        logging_steps=training.logging_steps,
        logging_nan_inf_filter=False,  # the filter would hide non-finite losses from NonFiniteLossCallback
        save_strategy="steps",
        save_steps=training.save_steps,
        eval_strategy="steps" if spec.dataset.has_evaluation else "no",
        eval_steps=training.eval_steps or total_steps,
        use_cpu=on_cpu,
        ddp_backend="gloo" if on_cpu else "nccl",
        ddp_timeout=training.ddp_timeout,
        ddp_find_unused_parameters=False,
        ddp_broadcast_buffers=False,
        dataloader_num_workers=loader_workers,
        deepspeed=build_deepspeed_config(spec.deepspeed) if spec.deepspeed else None,
        fsdp=True if spec.fsdp else None,
        fsdp_config=build_fsdp_config(spec),
        # Otherwise FSDP2 keeps the whole gradients of all micro-batches on every rank until the last micro-batch.
        accelerator_config={"gradient_accumulation_kwargs": {"sync_each_batch": spec.fsdp is not None}},
        report_to="none",
        disable_tqdm=True,
        log_level="warning",
        log_level_replica="error",
    )
