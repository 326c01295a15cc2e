"""What to change in a job so that it fits, tried in the order of what it costs the user."""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from finetune_api.batch import Batch, largest_that_fits, splits
from finetune_api.oom_repair import further_presets
from finetune_api.v1alpha1.job import TrainerSpec
from finetune_api.v1alpha1.lora import Lora
from finetune_api.v1alpha1.parallelism import Deepspeed
from finetune_trainer.memory.forecast import Forecast
from finetune_trainer.training_arguments import plan_batch, with_batch

_SHORTEST = 256
_LENGTHS_APART = 256

Forecaster = Callable[[TrainerSpec], Forecast]


@dataclass(frozen=True)
class Suggestion:
    """Fields with their new values, and what the job then needs."""

    changes: tuple[str, ...]
    forecast: Forecast


@dataclass(frozen=True)
class Variant:
    """A job that was changed, and how."""

    spec: TrainerSpec
    changes: tuple[str, ...] = ()

    def with_checkpointing(self) -> "Variant":
        if self.spec.training.gradient_checkpointing:
            return self
        return self._with("training", "training.gradientCheckpointing: true", gradient_checkpointing=True)

    def with_batch(self, per_device: int, accumulation: int) -> "Variant":
        """Of the same effective batch."""
        said = f"training.perDeviceTrainBatchSize: {per_device}, training.gradientAccumulationSteps: {accumulation}"
        sizes = {"per_device_train_batch_size": per_device, "gradient_accumulation_steps": accumulation}
        return self._with("training", said, **sizes)

    def with_length(self, length: int) -> "Variant":
        return self._with("dataset", f"dataset.maxLength: {length}", max_length=length)

    def with_preset(self, preset: str) -> "Variant":
        spread = Deepspeed.model_validate({"preset": preset})
        said = f"deepspeed: {{preset: {preset}}}"
        return Variant(self.spec.model_copy(update={"deepspeed": spread}), (*self.changes, said))

    def with_lora(self) -> "Variant":
        return Variant(self.spec.model_copy(update={"lora": Lora()}), (*self.changes, "lora: {}"))

    def with_four_bits(self) -> "Variant":
        """Of a job with adapters. Such weights cannot be spread."""
        if self.spec.spreads_weights or (self.spec.lora and self.spec.lora.quantization):
            return self
        return self._with("lora", "lora.quantization: nf4", quantization="nf4")

    def _with(self, section: str, said: str, **fields: Any) -> "Variant":
        changed = getattr(self.spec, section).model_copy(update=fields)
        return Variant(self.spec.model_copy(update={section: changed}), (*self.changes, said))


def choose_size(spec: TrainerSpec, forecaster: Forecaster, *, usable_bytes: int) -> TrainerSpec:
    """In the place of auto: as many samples at a time as are forecast to fit, or one."""

    def fits(batch: Batch) -> bool:
        return forecaster(with_batch(spec, batch)).rank.total <= usable_bytes

    smallest = plan_batch(spec, world_size=spec.world_size)
    found = largest_that_fits(splits(smallest), fits) if usable_bytes else None
    return with_batch(spec, found or smallest)


def suggest(spec: TrainerSpec, forecaster: Forecaster, *, usable_bytes: int) -> Suggestion | None:
    """The first of the changes that makes the job fit, by a forecast of its own; None if none does."""
    for variants in _ladder(Variant(spec), forecaster(spec)):
        found = _first_that_fits(variants, forecaster, usable_bytes=usable_bytes)
        if found is not None:
            return found
    return None


def _ladder(variant: Variant, forecast: Forecast) -> Iterator[Sequence[Variant]]:
    """Each rung holds variants that need less and less."""
    checkpointed = variant.with_checkpointing()
    if checkpointed is not variant:
        yield [checkpointed]
        yield _smaller_batches(variant, forecast)
    yield _smaller_batches(checkpointed, forecast)
    smallest = (_smaller_batches(checkpointed, forecast) or [checkpointed])[-1]
    presets = further_presets(variant.spec, world_size=variant.spec.world_size)
    yield [smallest.with_preset(preset) for preset in presets]
    if variant.spec.lora is None:
        yield [variant.with_lora()]
        yield [checkpointed.with_lora(), *(each.with_lora() for each in _smaller_batches(checkpointed, forecast))]
    adapted = smallest if variant.spec.lora else smallest.with_lora()
    packed = adapted.with_four_bits()
    if packed is not adapted:
        yield [packed]
    yield _shorter(smallest, forecast)
    if packed is not smallest:
        yield _shorter(packed, forecast)


def _smaller_batches(variant: Variant, forecast: Forecast) -> list[Variant]:
    samples = forecast.batch.per_device * forecast.batch.accumulation
    divisors = (size for size in range(forecast.batch.per_device - 1, 0, -1) if samples % size == 0)
    return [variant.with_batch(size, samples // size) for size in divisors]


def _shorter(variant: Variant, forecast: Forecast) -> list[Variant]:
    """None for a model that sees: shorter samples leave no room for its images."""
    if forecast.sees:
        return []
    longest = (forecast.length - 1) // _LENGTHS_APART * _LENGTHS_APART
    return [variant.with_length(length) for length in range(longest, _SHORTEST - 1, -_LENGTHS_APART)]


def _first_that_fits(variants: Sequence[Variant], forecaster: Forecaster, *, usable_bytes: int) -> Suggestion | None:
    """By bisection: a forecast takes seconds."""
    forecasts: dict[int, Forecast] = {}

    def fits(index: int) -> bool:
        forecasts[index] = forecaster(variants[index].spec)
        return forecasts[index].rank.total <= usable_bytes

    index = bisect_left(range(len(variants)), x=True, key=fits)
    return Suggestion(variants[index].changes, forecasts[index]) if index < len(variants) else None
