"""The spec as numbers: the batch, the steps, what transformers is told, and the fingerprint that guards a resume."""

import hashlib
import json
import math
import os
from dataclasses import dataclass
from pathlib import Path

import torch
from pydantic import ValidationError
from transformers import TrainingArguments

from finetune_api.batch import Batch, BatchError, resolve_batch
from finetune_api.learning_rates import resolve_rates
from finetune_api.schema.validation_errors import explain
from finetune_api.v1alpha1.job import TrainerSpec
from finetune_trainer.distributed.collectives import Ranks
from finetune_trainer.errors import InvalidSpec
from finetune_trainer.parallel.presets import deepspeed_config, fsdp_config

_EPOCHS = 3.0
MOST_LOADERS = 8  # processes per rank, unless the spec says otherwise
# What may change between two attempts without changing what is trained. The batch counts by its product.
_NOT_IN_FINGERPRINT = frozenset(
    {
        "per_device_train_batch_size",
        "gradient_accumulation_steps",
        "global_batch_size",
        "per_device_eval_batch_size",
        "gradient_checkpointing",
        "logging_steps",
        "report_to",
        "save_steps",
        "save_total_limit",
        "eval_steps",
        "ddp_timeout",
        "allow_mixed_hardware",
        "probe",
    }
)


@dataclass(frozen=True)
class Schedule:
    """How many samples, and how many optimizer steps they make."""

    samples: int
    steps_per_epoch: int
    total_steps: int

    @property
    def epochs(self) -> float:
        return self.total_steps / self.steps_per_epoch


def read_spec(path: Path) -> TrainerSpec:
    try:
        spec = TrainerSpec.model_validate_json(path.read_bytes())
    except ValidationError as error:
        raise InvalidSpec(explain(error, within="spec")) from error
    if spec.training.lr_scheduler_type == "constant" and spec.training.warmup_steps:
        raise InvalidSpec(
            "spec.training.warmupSteps has no effect with lrSchedulerType constant; use constant_with_warmup"
        )
    return spec


def plan_batch(spec: TrainerSpec, *, world_size: int) -> Batch:
    """With the ranks that there are; with auto one sample at a time. Raises InvalidSpec."""
    training = spec.training
    try:
        return resolve_batch(
            per_device=training.per_device_train_batch_size,
            accumulation=training.gradient_accumulation_steps,
            effective=training.global_batch_size,
            world_size=world_size,
        )
    except BatchError as error:
        raise InvalidSpec(f"spec.training: {error}") from error


def with_batch(spec: TrainerSpec, batch: Batch) -> TrainerSpec:
    """The same job with the sizes written down."""
    sizes = {"per_device_train_batch_size": batch.per_device, "gradient_accumulation_steps": batch.accumulation}
    return spec.model_copy(update={"training": spec.training.model_copy(update=sizes)})


def plan_eval_batch(spec: TrainerSpec, batch: Batch) -> Batch:
    return Batch(spec.training.per_device_eval_batch_size or batch.per_device, 1, batch.world_size)


def plan_schedule(spec: TrainerSpec, batch: Batch, *, samples: int) -> Schedule:
    """The last step of an epoch takes what is left, so that an epoch sees every sample once."""
    steps_per_epoch = math.ceil(samples / batch.effective)
    epochs = spec.training.num_train_epochs or _EPOCHS
    return Schedule(samples, steps_per_epoch, spec.training.max_steps or math.ceil(epochs * steps_per_epoch))


def fingerprint(spec: TrainerSpec, batch: Batch) -> str:
    """Of all that decides what comes out: a checkpoint of another fingerprint is not resumed from."""
    chosen = spec.model_dump(mode="json", include={"model", "dataset", "sft", "dpo", "lora", "training"})
    chosen["dataset"].pop("num_workers")
    chosen["training"] = {k: v for k, v in chosen["training"].items() if k not in _NOT_IN_FINGERPRINT}
    described = json.dumps({**chosen, "effectiveBatch": batch.effective}, sort_keys=True)
    return hashlib.sha256(described.encode()).hexdigest()[:16]


def loader_processes(spec: TrainerSpec, ranks: Ranks) -> int:
    """Per rank: its share of the cores this container may use, less one for the rank itself."""
    if spec.dataset.num_workers is not None:
        return spec.dataset.num_workers
    return min(MOST_LOADERS, max(1, len(os.sched_getaffinity(0)) // ranks.local_world_size - 1))


@dataclass(frozen=True)
class Hardware:
    """On what a rank computes, and in which precision."""

    device: torch.device
    dtype: torch.dtype


def training_arguments(
    spec: TrainerSpec, batch: Batch, schedule: Schedule, hardware: Hardware, *, folder: Path, workers: int
) -> TrainingArguments:
    training = spec.training
    on_cpu = hardware.device.type == "cpu"
    return TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=batch.per_device,
        gradient_accumulation_steps=batch.accumulation,
        average_tokens_across_devices=training.average_tokens_across_devices,
        learning_rate=resolve_rates(spec, batch).usual,
        lr_scheduler_type=training.lr_scheduler_type,
        warmup_steps=training.warmup_steps,
        weight_decay=training.weight_decay,
        max_grad_norm=training.max_grad_norm,
        max_steps=schedule.total_steps,
        activation_checkpointing=training.gradient_checkpointing,
        activation_checkpointing_kwargs={"use_reentrant": False} if training.gradient_checkpointing else None,
        bf16=hardware.dtype is torch.bfloat16,
        fp16=hardware.dtype is torch.float16,
        seed=training.seed,
        logging_steps=training.logging_steps,
        logging_nan_inf_filter=False,  # it would hide what RefuseNonFiniteLoss looks for
        save_strategy="steps",
        save_steps=training.save_steps,
        eval_strategy="steps" if spec.dataset.evaluates else "no",
        eval_steps=training.eval_steps or schedule.total_steps,
        use_cpu=on_cpu,
        ddp_backend="gloo" if on_cpu else "nccl",
        ddp_timeout=training.ddp_timeout,
        # DDP regroups its buckets after the first step unless it looks for unused parameters; with more than two ranks
        # the regrouping changes the order of additions, and a resumed run would differ in the last bit.
        ddp_find_unused_parameters=on_cpu,
        ddp_broadcast_buffers=False,
        dataloader_num_workers=workers,
        deepspeed=deepspeed_config(spec.deepspeed) if spec.deepspeed else None,
        fsdp=True if spec.fsdp else None,
        fsdp_config=fsdp_config(spec),
        report_to="none",
        disable_tqdm=True,
        log_level="warning",
        log_level_replica="error",
    )
