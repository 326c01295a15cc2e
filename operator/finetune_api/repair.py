"""What to change when a GPU's memory ran out, so that the job fits and what it learns stays the same."""

from collections.abc import Callable

from finetune_api.batch import Batch
from finetune_api.kubernetes_types import EnvVar
from finetune_api.parallelism import Deepspeed
from finetune_api.status import Repair
from finetune_api.v1alpha1 import FineTuneJobSpec

ALLOCATOR = "PYTORCH_ALLOC_CONF"
_ALLOCATOR_BEFORE = "PYTORCH_CUDA_ALLOC_CONF"  # its older name, which torch still reads
_EXPANDABLE = "expandable_segments:True"
_PRESETS_OF_LORA = ("zero3", "zero3_offload")  # nearly all memory is the frozen model, which only stage 3 spreads
_PRESETS = ("zero1", "zero2", "zero3", "zero3_offload")

Step = Callable[[FineTuneJobSpec, Repair, Batch], tuple[Repair, str] | None]


def apply_repair(spec: FineTuneJobSpec, repair: Repair | None) -> FineTuneJobSpec:
    """The spec that is really trained; its effective batch is that of the one that was asked for."""
    if repair is None:
        return spec
    names = ("per_device_train_batch_size", "gradient_accumulation_steps", "gradient_checkpointing")
    changed = {name: value for name in names if (value := getattr(repair, name)) is not None}
    update: dict[str, object] = {"training": spec.training.model_copy(update=changed)} if changed else {}
    if repair.expandable_segments:
        update["env"] = (*spec.env, EnvVar(name=ALLOCATOR, value=_EXPANDABLE))
    if repair.deepspeed is not None:
        update["deepspeed"] = Deepspeed.model_validate({"preset": repair.deepspeed})
    return spec.model_copy(update=update)


def next_repair(spec: FineTuneJobSpec, before: Repair | None, batch: Batch) -> tuple[Repair, str] | None:
    """The cheapest change that is left, with those before it, and what is new in words; None if nothing is left.

    `batch` is that of the attempt that ran out of memory.
    """
    if spec.command is not None:  # what a program of the user's own does with memory nobody else can change
        return None
    repaired = apply_repair(spec, before)
    found = (step(repaired, before or Repair(), batch) for step in _LADDER)
    return next((each for each in found if each is not None), None)


def _smaller_micro_batches(_spec: FineTuneJobSpec, before: Repair, batch: Batch) -> tuple[Repair, str] | None:
    """Half as many samples at a time, or the next number below that divides them, and so many times more often."""
    smaller = next((size for size in range(batch.per_device // 2, 0, -1) if batch.per_device % size == 0), None)
    if smaller is None:
        return None
    accumulation = batch.accumulation * (batch.per_device // smaller)
    said = (
        f"perDeviceTrainBatchSize {batch.per_device} -> {smaller}, gradientAccumulationSteps {batch.accumulation} ->"
        f" {accumulation} (effective batch stays {batch.effective})"
    )
    sizes = {"per_device_train_batch_size": smaller, "gradient_accumulation_steps": accumulation}
    return before.model_copy(update=sizes), said


def _checkpointing(spec: FineTuneJobSpec, before: Repair, _batch: Batch) -> tuple[Repair, str] | None:
    if spec.training.gradient_checkpointing:
        return None
    return before.model_copy(update={"gradient_checkpointing": True}), "gradientCheckpointing: true"


def _expandable_segments(spec: FineTuneJobSpec, before: Repair, _batch: Batch) -> tuple[Repair, str] | None:
    if any(variable.name in (ALLOCATOR, _ALLOCATOR_BEFORE) for variable in spec.env):
        return None
    return before.model_copy(update={"expandable_segments": True}), f"{ALLOCATOR}={_EXPANDABLE}"


def _spread(spec: FineTuneJobSpec, before: Repair, batch: Batch) -> tuple[Repair, str] | None:
    """The next preset of DeepSpeed, where there is more than one rank and the user chose no other way to spread.

    Weights in 4 bits do not spread, and DeepSpeed's gradients cannot be undone after a probe.
    """
    own = spec.deepspeed.preset if spec.deepspeed else None
    packed = spec.lora is not None and spec.lora.quantization is not None
    if batch.world_size == 1 or spec.fsdp is not None or (spec.deepspeed is not None and own is None):
        return None
    if packed or spec.training.probe:
        return None
    presets = _PRESETS_OF_LORA if spec.lora else _PRESETS
    now = _PRESETS.index(own.replace("zero2_offload", "zero2")) if own else -1
    preset = next((preset for preset in presets if _PRESETS.index(preset) > now), None)
    if preset is None:
        return None
    return before.model_copy(update={"deepspeed": preset}), f"deepspeed preset {own or 'none'} -> {preset}"


_LADDER: tuple[Step, ...] = (_smaller_micro_batches, _checkpointing, _expandable_segments, _spread)
