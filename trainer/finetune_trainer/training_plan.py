"""Derive the training plan from the spec: batch, schedule, learning rates and fingerprint."""

import hashlib
import json
import math
from dataclasses import dataclass, replace

from finetune_api.batch import Batch, BatchError, resolve_batch
from finetune_api.learning_rates import LearningRates, resolve_learning_rates
from finetune_api.v1alpha1.job import TrainerSpec
from finetune_trainer.errors import InvalidSpec

FINGERPRINT_VERSION = "v2"  # version of the algorithm; fingerprints of other versions cannot be compared
_DEFAULT_EPOCHS = 3.0
# Fields that may change between attempts without changing the result. Of the batch sizes, only the product is hashed.
NOT_IN_FINGERPRINT = frozenset(
    {
        "per_device_train_batch_size",
        "gradient_accumulation_steps",
        "global_batch_size",
        "per_device_eval_batch_size",
        "gradient_checkpointing",
        "gradient_checkpointing_interval",
        "logging_steps",
        "report_to",
        "save_steps",
        "save_total_limit",
        "async_checkpoints",
        "eval_steps",
        "ddp_timeout",
        "allow_mixed_hardware",
        "preflight",
        "on_degraded",
        "probe",
    }
)


@dataclass(frozen=True)
class Schedule:
    """Number of samples and optimizer steps per epoch, and the total number of optimizer steps."""

    samples: int
    steps_per_epoch: int
    total_steps: int

    @property
    def epochs(self) -> float:
        """The number of epochs; a fraction if training ends within an epoch."""
        return self.total_steps / self.steps_per_epoch


@dataclass(frozen=True)
class TrainingPlan:
    """Values derived from a spec and the world size; `plan_training` computes them once per run.

    Afterwards only the micro-batch may change (`with_micro_batch`). Schedule, learning rates and fingerprint depend on
    the effective batch, which never changes.
    """

    spec: TrainerSpec
    batch: Batch
    learning_rates: LearningRates
    fingerprint: str  # hash of the settings that determine the result; only checkpoints with this hash are resumed
    samples: int | None = None  # rows or packs per epoch; None until the data is loaded

    @property
    def eval_batch(self) -> Batch:
        """The evaluation batch; its micro-batch size is by default that of training."""
        return Batch(
            self.spec.training.per_device_eval_batch_size or self.batch.micro_batch_size, 1, self.batch.world_size
        )

    @property
    def schedule(self) -> Schedule:
        """The schedule. Each sample is used once per epoch, so the last step of an epoch may have fewer samples."""
        assert self.samples is not None, "the schedule depends on the data"
        training = self.spec.training
        steps_per_epoch = math.ceil(self.samples / self.batch.effective)
        epochs = training.num_train_epochs or _DEFAULT_EPOCHS
        return Schedule(self.samples, steps_per_epoch, training.max_steps or math.ceil(epochs * steps_per_epoch))

    def with_samples(self, samples: int) -> "TrainingPlan":
        """Return a copy of the plan with this number of samples per epoch."""
        return replace(self, samples=samples)

    def with_micro_batch(self, batch: Batch) -> "TrainingPlan":
        """Return a copy of the plan, with the effective batch split differently into micro-batches in plan and spec."""
        assert batch.effective == self.batch.effective, f"{batch} is not a split of {self.batch}"
        sizes = {
            "per_device_train_batch_size": batch.micro_batch_size,
            "gradient_accumulation_steps": batch.accumulation_steps,
        }
        training = self.spec.training.model_copy(update=sizes)
        return replace(self, spec=self.spec.model_copy(update={"training": training}), batch=batch)


def plan_training(spec: TrainerSpec, *, world_size: int) -> TrainingPlan:
    """Derive the plan from the spec; the batch size `auto` counts as one sample per device. Raises InvalidSpec."""
    training = spec.training
    try:
        batch = resolve_batch(
            micro_batch_size=training.per_device_train_batch_size,
            accumulation_steps=training.gradient_accumulation_steps,
            effective_batch=training.global_batch_size,
            world_size=world_size,
        )
    except BatchError as error:
        raise InvalidSpec(f"spec.training: {error}") from error
    return TrainingPlan(spec, batch, resolve_learning_rates(spec, batch), _compute_fingerprint(spec, batch))


def _compute_fingerprint(spec: TrainerSpec, batch: Batch) -> str:
    """Return `version:hash` of the settings that the user set and that determine the result.

    Defaults are excluded, so that a field that another release adds does not change the fingerprint of a job.
    """
    included = {"model", "dataset", "sft", "dpo", "lora", "training"}
    fields = spec.model_dump(mode="json", include=included, exclude_unset=True)
    fields["dataset"].pop("num_workers", None)
    training = fields.pop("training", {})
    fields["training"] = {k: v for k, v in training.items() if k not in NOT_IN_FINGERPRINT}
    canonical_json = json.dumps({**fields, "effectiveBatch": batch.effective}, sort_keys=True)
    return f"{FINGERPRINT_VERSION}:{hashlib.sha256(canonical_json.encode()).hexdigest()[:16]}"
