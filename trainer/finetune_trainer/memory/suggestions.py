"""Suggest changes that make a job fit into GPU memory, in the order of their cost for the user."""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from finetune_api.batch import Batch, find_largest_fitting_batch, list_batch_splits
from finetune_api.oom_repair import list_stronger_sharding_presets
from finetune_api.v1alpha1.job import TrainerSpec
from finetune_api.v1alpha1.lora import Lora
from finetune_api.v1alpha1.parallelism import Deepspeed
from finetune_trainer.errors import InvalidSpec
from finetune_trainer.memory.forecast import Forecast
from finetune_trainer.training_plan import plan_training

_MIN_LENGTH = 256  # tokens
_LENGTH_STEP = 256  # tokens

Forecaster = Callable[[TrainerSpec], Forecast]


@dataclass(frozen=True)
class Suggestion:
    """Suggested changes of spec fields, and the forecast for the changed job."""

    changes: tuple[str, ...]
    forecast: Forecast


@dataclass(frozen=True)
class SpecVariant:
    """A changed copy of a spec, with a description of the changes."""

    spec: TrainerSpec
    changes: tuple[str, ...] = ()

    def with_gradient_checkpointing(self) -> "SpecVariant":
        """Return a copy that recomputes the activations of all layers, or self if it does so already."""
        interval = self.spec.training.recomputation_interval
        if interval == 1:
            return self
        if interval is None:
            return self._change_section("training", "training.gradientCheckpointing: true", gradient_checkpointing=True)
        change = "training.gradientCheckpointingInterval: 1"
        return self._change_section("training", change, gradient_checkpointing_interval=1)

    def with_micro_batch_size(self, micro_batch_size: int, accumulation_steps: int) -> "SpecVariant":
        """Return a copy with a smaller micro-batch; the caller keeps the effective batch the same."""
        sizes = {"per_device_train_batch_size": micro_batch_size, "gradient_accumulation_steps": accumulation_steps}
        change = (
            f"training.perDeviceTrainBatchSize: {micro_batch_size},"
            f" training.gradientAccumulationSteps: {accumulation_steps}"
        )
        return self._change_section("training", change, **sizes)

    def with_length(self, length: int) -> "SpecVariant":
        """Return a copy with samples of at most `length` tokens."""
        return self._change_section("dataset", f"dataset.maxLength: {length}", max_length=length)

    def with_preset(self, preset: str) -> "SpecVariant":
        """Return a copy with this DeepSpeed preset."""
        deepspeed = Deepspeed.model_validate({"preset": preset})
        change = f"deepspeed: {{preset: {preset}}}"
        return SpecVariant(self.spec.model_copy(update={"deepspeed": deepspeed}), (*self.changes, change))

    def with_lora(self) -> "SpecVariant":
        """Return a copy that trains adapters with the default settings."""
        return SpecVariant(self.spec.model_copy(update={"lora": Lora()}), (*self.changes, "lora: {}"))

    def with_quantization(self) -> "SpecVariant":
        """Return a copy with 4-bit base weights, or self if the weights are sharded or quantized already."""
        if self.spec.shards_weights or (self.spec.lora and self.spec.lora.quantization):
            return self
        return self._change_section("lora", "lora.quantization: nf4", quantization="nf4")

    def _change_section(self, section: str, change: str, **fields: Any) -> "SpecVariant":
        changed_section = getattr(self.spec, section).model_copy(update=fields)
        return SpecVariant(self.spec.model_copy(update={section: changed_section}), (*self.changes, change))


def choose_batch_size(spec: TrainerSpec, forecaster: Forecaster, *, usable_bytes: int) -> TrainerSpec:
    """Replace perDeviceTrainBatchSize auto by the largest micro-batch that is forecast to fit, or by 1 if none fits."""
    plan = plan_training(spec, world_size=spec.world_size)

    def fits(batch: Batch) -> bool:
        return forecaster(plan.with_micro_batch(batch).spec).rank.total <= usable_bytes

    largest_batch = find_largest_fitting_batch(list_batch_splits(plan.batch), fits) if usable_bytes else None
    return plan.with_micro_batch(largest_batch or plan.batch).spec


def suggest_changes(spec: TrainerSpec, forecaster: Forecaster, *, usable_bytes: int) -> Suggestion | None:
    """Return the cheapest changes with which the job is forecast to fit, or None if no changes suffice."""
    for variants in _iterate_variants(SpecVariant(spec), forecaster(spec)):
        suggestion = _find_first_fitting(variants, forecaster, usable_bytes=usable_bytes)
        if suggestion is not None:
            return suggestion
    return None


def _iterate_variants(variant: SpecVariant, forecast: Forecast) -> Iterator[Sequence[SpecVariant]]:
    """Yield sequences of variants in the order of their cost; within a sequence, the memory decreases."""
    # Gradient checkpointing and smaller micro-batches do not change the result.
    checkpointed_variant = variant.with_gradient_checkpointing()
    if checkpointed_variant is not variant:
        yield [checkpointed_variant]
        yield _list_smaller_batches(variant, forecast)
    yield _list_smaller_batches(checkpointed_variant, forecast)
    # More sharding costs communication.
    smallest_batch_variant = (_list_smaller_batches(checkpointed_variant, forecast) or [checkpointed_variant])[-1]
    presets = list_stronger_sharding_presets(variant.spec, world_size=variant.spec.world_size)
    yield [smallest_batch_variant.with_preset(preset) for preset in presets]
    # Adapters, 4-bit weights and shorter samples change the result.
    if variant.spec.lora is None:
        yield [variant.with_lora()]
        yield [
            checkpointed_variant.with_lora(),
            *(smaller.with_lora() for smaller in _list_smaller_batches(checkpointed_variant, forecast)),
        ]
    adapter_variant = smallest_batch_variant if variant.spec.lora else smallest_batch_variant.with_lora()
    quantized_variant = adapter_variant.with_quantization()
    if quantized_variant is not adapter_variant:
        yield [quantized_variant]
    yield _list_shorter_samples(smallest_batch_variant, forecast)
    if quantized_variant is not smallest_batch_variant:
        yield _list_shorter_samples(quantized_variant, forecast)


def _list_smaller_batches(variant: SpecVariant, forecast: Forecast) -> list[SpecVariant]:
    """Return variants with smaller micro-batches and the same effective batch."""
    samples = forecast.batch.micro_batch_size * forecast.batch.accumulation_steps
    divisors = (size for size in range(forecast.batch.micro_batch_size - 1, 0, -1) if samples % size == 0)
    return [variant.with_micro_batch_size(size, samples // size) for size in divisors]


def _list_shorter_samples(variant: SpecVariant, forecast: Forecast) -> list[SpecVariant]:
    """Return variants with shorter samples; none for multimodal samples, which cannot be shorter than their images."""
    if forecast.is_multimodal:
        return []
    max_length = (forecast.length - 1) // _LENGTH_STEP * _LENGTH_STEP
    return [variant.with_length(length) for length in range(max_length, _MIN_LENGTH - 1, -_LENGTH_STEP)]


def _find_first_fitting(
    variants: Sequence[SpecVariant], forecaster: Forecaster, *, usable_bytes: int
) -> Suggestion | None:
    """Find the first variant that fits, by bisection, because one forecast takes seconds."""

    forecasts: dict[int, Forecast] = {}

    def fits(index: int) -> bool:
        try:
            forecasts[index] = forecaster(variants[index].spec)
        except InvalidSpec:  # the model does not support the change, such as fused experts with 4-bit weights
            return False
        return forecasts[index].rank.total <= usable_bytes

    index = bisect_left(range(len(variants)), x=True, key=fits)
    return Suggestion(variants[index].changes, forecasts[index]) if index < len(variants) else None
