"""The training plan derived from the spec: batch, schedule, TrainingArguments of transformers and fingerprint."""

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
from finetune_api.learning_rates import resolve_learning_rates
from finetune_api.schema.validation_errors import explain_validation_error
from finetune_api.v1alpha1.job import TrainerSpec
from finetune_trainer.distributed.collectives import Ranks
from finetune_trainer.errors import InvalidSpec
from finetune_trainer.parallel.presets import deepspeed_config, fsdp_config

_EPOCHS = 3.0
MAX_LOADER_WORKERS = 8  # processes per rank, unless spec.dataset.numWorkers is set
# Fields that may change between attempts without changing the training; of the batch sizes only the product counts.
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
    """The number of samples per epoch, and of optimizer steps per epoch and in total."""

    samples: int
    steps_per_epoch: int
    total_steps: int

    @property
    def epochs(self) -> float:
        """The number of epochs, with a fraction if training ends within one."""
        return self.total_steps / self.steps_per_epoch


def read_spec(path: Path) -> TrainerSpec:
    """Read the spec that the operator wrote. Raises InvalidSpec."""
    try:
        spec = TrainerSpec.model_validate_json(path.read_bytes())
    except ValidationError as error:
        raise InvalidSpec(explain_validation_error(error, within="spec")) from error
    if spec.training.lr_scheduler_type == "constant" and spec.training.warmup_steps:
        raise InvalidSpec(
            "spec.training.warmupSteps has no effect with lrSchedulerType constant; use constant_with_warmup"
        )
    return spec


def plan_batch(spec: TrainerSpec, *, world_size: int) -> Batch:
    """Return the batch of the spec for this world size; `auto` counts as one sample per device. Raises InvalidSpec."""
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
    """Return the spec with the batch sizes set to those of `batch`."""
    sizes = {"per_device_train_batch_size": batch.per_device, "gradient_accumulation_steps": batch.accumulation}
    return spec.model_copy(update={"training": spec.training.model_copy(update=sizes)})


def plan_eval_batch(spec: TrainerSpec, batch: Batch) -> Batch:
    """Return the evaluation batch, by default with the micro-batch size of training."""
    return Batch(spec.training.per_device_eval_batch_size or batch.per_device, 1, batch.world_size)


def plan_schedule(spec: TrainerSpec, batch: Batch, *, samples: int) -> Schedule:
    """Return the schedule; the last step of an epoch may have fewer samples, so each is used once per epoch."""
    steps_per_epoch = math.ceil(samples / batch.effective)
    epochs = spec.training.num_train_epochs or _EPOCHS
    return Schedule(samples, steps_per_epoch, spec.training.max_steps or math.ceil(epochs * steps_per_epoch))


def compute_fingerprint(spec: TrainerSpec, batch: Batch) -> str:
    """Return a hash of everything that determines the result; checkpoints with another fingerprint are not resumed."""
    fields = spec.model_dump(mode="json", include={"model", "dataset", "sft", "dpo", "lora", "training"})
    fields["dataset"].pop("num_workers")
    fields["training"] = {k: v for k, v in fields["training"].items() if k not in _NOT_IN_FINGERPRINT}
    canonical = json.dumps({**fields, "effectiveBatch": batch.effective}, sort_keys=True)
    return hashlib.sha256(canonical.encode()).hexdigest()[:16]


def choose_loader_workers(spec: TrainerSpec, ranks: Ranks) -> int:
    """Return the loader processes per rank: its share of the container's cores, minus one for the rank itself."""
    if spec.dataset.num_workers is not None:
        return spec.dataset.num_workers
    return min(MAX_LOADER_WORKERS, max(1, len(os.sched_getaffinity(0)) // ranks.local_world_size - 1))


@dataclass(frozen=True)
class DeviceConfig:
    """The device of a rank and the dtype it computes in."""

    device: torch.device
    dtype: torch.dtype


def build_training_arguments(
    spec: TrainerSpec, batch: Batch, schedule: Schedule, device_config: DeviceConfig, *, folder: Path, workers: int
) -> TrainingArguments:
    """Return the arguments of the transformers Trainer. folder: for checkpoints. workers: loader processes per rank."""
    training = spec.training
    on_cpu = device_config.device.type == "cpu"
    return TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=batch.per_device,
        gradient_accumulation_steps=batch.accumulation,
        average_tokens_across_devices=training.average_tokens_across_devices,
        learning_rate=resolve_learning_rates(spec, batch).default,
        lr_scheduler_type=training.lr_scheduler_type,
        warmup_steps=training.warmup_steps,
        weight_decay=training.weight_decay,
        max_grad_norm=training.max_grad_norm,
        max_steps=schedule.total_steps,
        activation_checkpointing=training.gradient_checkpointing,
        activation_checkpointing_kwargs={"use_reentrant": False} if training.gradient_checkpointing else None,
        bf16=device_config.dtype is torch.bfloat16,
        fp16=device_config.dtype is torch.float16,
        seed=training.seed,
        logging_steps=training.logging_steps,
        logging_nan_inf_filter=False,  # it would hide the values that NonFiniteLossCallback checks for
        save_strategy="steps",
        save_steps=training.save_steps,
        eval_strategy="steps" if spec.dataset.has_evaluation else "no",
        eval_steps=training.eval_steps or schedule.total_steps,
        use_cpu=on_cpu,
        ddp_backend="gloo" if on_cpu else "nccl",
        ddp_timeout=training.ddp_timeout,
        # DDP rebuilds its buckets after the first step unless it looks for unused parameters. With more than two ranks
        # that changes the order of additions, and a resumed run would differ in the last bit.
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
