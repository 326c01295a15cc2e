"""Repairs the spec after an out-of-memory failure without changing the training result."""

import math
from collections.abc import Callable
from dataclasses import dataclass

from finetune_api.batch import Batch
from finetune_api.v1alpha1.job import FineTuneJobSpec
from finetune_api.v1alpha1.parallelism import Deepspeed
from finetune_api.v1alpha1.pod_types import EnvVar
from finetune_api.v1alpha1.quantity import format_bytes, parse_quantity
from finetune_api.v1alpha1.reasons import Reason
from finetune_api.v1alpha1.repair import Repair
from finetune_api.v1alpha1.training import EIGHT_BIT_ADAMW

ALLOCATOR_VARIABLE = "PYTORCH_ALLOC_CONF"
_DEPRECATED_ALLOCATOR_VARIABLE = "PYTORCH_CUDA_ALLOC_CONF"  # deprecated name that torch still accepts
_EXPANDABLE_SEGMENTS = "expandable_segments:True"
# LoRA jobs need ZeRO-3: lower stages do not shard the frozen weights, which use most of the memory
_LORA_SHARDING_PRESETS = ("zero3", "zero3_offload")
_SHARDING_PRESETS = ("zero1", "zero2", "zero3", "zero3_offload")
_MAX_NUMBER = 2**24  # the largest globalBatchSize
_MAX_QUOTED_CHARACTERS = 200  # of an unsupported value in a message


@dataclass(frozen=True)
class MemoryShortage:
    """Out-of-memory failure of an attempt, with the data that determines the next repair."""

    reason: Reason  # CudaOutOfMemory, HostOutOfMemory or SharedMemoryExhausted
    spec: FineTuneJobSpec  # spec of the job, without any repair
    repair: Repair | None  # repair applied to the attempt
    batch: Batch | None  # batch of the attempt; None for a command, whose batch is unknown
    runs_in_container: bool = True  # False in local mode, which has no resource limits

    @property
    def effective_spec(self) -> FineTuneJobSpec:
        """Spec with which the attempt ran, including its repair."""
        return apply_repair(self.spec, self.repair)

    def extend_repair(self, **changed_fields: object) -> Repair:
        """Return a copy of the current repair with these fields changed."""
        return (self.repair or Repair()).model_copy(update=changed_fields)


RepairStep = Callable[[MemoryShortage], tuple[Repair, str] | None]


def apply_repair(spec: FineTuneJobSpec, repair: Repair | None) -> FineTuneJobSpec:
    """Return the spec with the repair applied; the effective batch is unchanged."""
    if repair is None:
        return spec
    update: dict[str, object] = {}
    names = (
        "per_device_train_batch_size",
        "gradient_accumulation_steps",
        "gradient_checkpointing",
        "gradient_checkpointing_interval",
    )
    if training := {name: value for name in names if (value := getattr(repair, name)) is not None}:
        update["training"] = spec.training.model_copy(update=training)
    if repair.expandable_segments:
        update["env"] = (*spec.env, EnvVar(name=ALLOCATOR_VARIABLE, value=_EXPANDABLE_SEGMENTS))
    if repair.deepspeed is not None:
        update["deepspeed"] = Deepspeed.model_validate({"preset": repair.deepspeed})
    if repair.memory is not None:
        update["resources"] = spec.resources.with_memory_limit(repair.memory)
    if repair.shm_size is not None:
        update["shm_size"] = repair.shm_size
    if repair.num_workers is not None and spec.dataset is not None:
        update["dataset"] = spec.dataset.model_copy(update={"num_workers": repair.num_workers})
    return spec.model_copy(update=update)


def explain_unsupported_repair(repair: Repair | None) -> str:
    """Return why this release cannot apply a repair, which another release may have written; empty if it can."""
    if repair is None:
        return ""
    minimums = {
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": 1,
        "gradient_checkpointing_interval": 1,
        "num_workers": 0,
    }
    for name, minimum in minimums.items():
        if (number := getattr(repair, name)) is not None and not minimum <= number <= _MAX_NUMBER:
            return f"status.repair: {name} is {number}, not between {minimum} and {_MAX_NUMBER}"
    if repair.deepspeed is not None and repair.deepspeed not in _SHARDING_PRESETS:
        return f"status.repair.deepspeed: unknown preset {repair.deepspeed[:_MAX_QUOTED_CHARACTERS]!r}"
    for quantity in (repair.memory, repair.shm_size):
        try:
            parse_quantity("0" if quantity is None else quantity)
        except ValueError as error:
            return f"status.repair: {str(error)[:_MAX_QUOTED_CHARACTERS]}"
    return ""


def find_next_repair(shortage: MemoryShortage) -> tuple[Repair, str] | None:
    """Return the cheapest remaining repair and a description of its change, or None if no repair is left.

    The repair includes all earlier changes and adds one more (decisions/208).
    """
    repairs = (step(shortage) for step in _REPAIR_STEPS[shortage.reason])
    return next((repair for repair in repairs if repair is not None), None)


def build_memory_advice(shortage: MemoryShortage) -> str:
    """Return advice for the user if an out-of-memory failure cannot be repaired."""
    spec, is_command = shortage.effective_spec, shortage.spec.command is not None
    loader_advice = "start fewer loader processes" + ("" if is_command else " (dataset.numWorkers)")
    if shortage.reason is Reason.CUDA_OUT_OF_MEMORY:
        # if restarts are enabled, earlier repairs have already reduced the micro-batch size
        can_be_smaller = is_command or not shortage.spec.restart_policy.max_restarts
        return "use smaller batches, or larger or more GPUs" if can_be_smaller else shortage.reason.advice
    if not shortage.runs_in_container:
        return f"{loader_advice}, or use a host with more memory"
    if shortage.reason is Reason.SHARED_MEMORY_EXHAUSTED:
        if spec.shm_bytes is None:
            return f"shared memory had no other limit than the memory of the Kubernetes node: {loader_advice}"
        return f"shared memory had {format_bytes(spec.shm_bytes)}: raise shmSize, or {loader_advice}"
    limit = spec.resources.limits.get("memory")
    if limit is None:
        return (
            f"no limit was set and the Kubernetes node had no more: set resources.requests.memory, or {loader_advice}"
        )
    max_memory_hint = "" if spec.restart_policy.max_memory else " (restartPolicy.maxMemory lets the operator do so)"
    return f"the limit was {limit}: raise resources.limits.memory{max_memory_hint}, or {loader_advice}"


def _double_memory_limit(shortage: MemoryShortage) -> tuple[Repair, str] | None:
    """Double the memory limit, up to restartPolicy.maxMemory (decisions/209)."""
    spec = shortage.effective_spec
    limit, max_memory = spec.resources.limits.get("memory"), spec.restart_policy.max_memory
    if limit is None or max_memory is None or not shortage.runs_in_container:
        return None
    current_bytes = parse_quantity(limit)
    larger_bytes = min(2 * current_bytes, parse_quantity(max_memory))
    if larger_bytes <= current_bytes:
        return None
    memory = format_bytes(int(larger_bytes))
    return shortage.extend_repair(memory=memory), f"resources.limits.memory {limit} -> {memory}"


def _double_shm_size(shortage: MemoryShortage) -> tuple[Repair, str] | None:
    """Double the size of /dev/shm at most once, because its contents count against the container's memory limit.

    Without a memory limit and shmSize, it has no size that could be raised.
    """
    spec = shortage.effective_spec
    limit, current_bytes = spec.resources.limits.get("memory"), spec.shm_bytes
    if current_bytes is None:
        return None
    larger_bytes = 2 * current_bytes if limit is None else min(2 * current_bytes, int(parse_quantity(limit)))
    was_doubled = shortage.repair is not None and shortage.repair.shm_size is not None
    if was_doubled or larger_bytes <= current_bytes or not shortage.runs_in_container:
        return None
    size = format_bytes(larger_bytes)
    return shortage.extend_repair(shm_size=size), f"shmSize {format_bytes(current_bytes)} -> {size}"


def _reduce_loader_processes(shortage: MemoryShortage) -> tuple[Repair, str] | None:
    """Reduce the number of data loader processes per rank to 1, then to 0. The order of rows does not change."""
    dataset = shortage.effective_spec.dataset
    if dataset is None or dataset.num_workers == 0:
        return None
    workers = 0 if dataset.num_workers == 1 else 1
    previous_workers = "default" if dataset.num_workers is None else dataset.num_workers
    return shortage.extend_repair(num_workers=workers), f"dataset.numWorkers {previous_workers} -> {workers}"


def _reduce_micro_batch(shortage: MemoryShortage) -> tuple[Repair, str] | None:
    """Reduce the micro-batch size to its largest proper divisor and keep the effective batch."""
    batch = shortage.batch
    if batch is None:
        return None
    size = batch.micro_batch_size
    if size <= 1:
        return None
    smaller_size = size // next((factor for factor in range(2, math.isqrt(size) + 1) if size % factor == 0), size)
    accumulation_steps = batch.accumulation_steps * (batch.micro_batch_size // smaller_size)
    change = (
        f"perDeviceTrainBatchSize {batch.micro_batch_size} -> {smaller_size},"
        f" gradientAccumulationSteps {batch.accumulation_steps} -> {accumulation_steps}"
        f" (effective batch stays {batch.effective})"
    )
    return shortage.extend_repair(
        per_device_train_batch_size=smaller_size, gradient_accumulation_steps=accumulation_steps
    ), change


def _enable_gradient_checkpointing(shortage: MemoryShortage) -> tuple[Repair, str] | None:
    """Recompute the activations of all layers."""
    interval = shortage.effective_spec.training.recomputation_interval
    if shortage.batch is None or interval == 1:
        return None
    if interval is None:
        return shortage.extend_repair(gradient_checkpointing=True), "gradientCheckpointing: true"
    return shortage.extend_repair(gradient_checkpointing_interval=1), f"gradientCheckpointingInterval {interval} -> 1"


def _enable_expandable_segments(shortage: MemoryShortage) -> tuple[Repair, str] | None:
    is_set = any(
        variable.name in (ALLOCATOR_VARIABLE, _DEPRECATED_ALLOCATOR_VARIABLE)
        for variable in shortage.effective_spec.env
    )
    if shortage.batch is None or is_set:
        return None
    return shortage.extend_repair(expandable_segments=True), f"{ALLOCATOR_VARIABLE}={_EXPANDABLE_SEGMENTS}"


def _raise_sharding_level(shortage: MemoryShortage) -> tuple[Repair, str] | None:
    spec, batch = shortage.effective_spec, shortage.batch
    presets = list_stronger_sharding_presets(spec, world_size=batch.world_size) if batch else ()
    if not presets:
        return None
    current = spec.deepspeed.preset if spec.deepspeed else "none"
    return shortage.extend_repair(deepspeed=presets[0]), f"deepspeed preset {current} -> {presets[0]}"


def list_stronger_sharding_presets(spec: FineTuneJobSpec, *, world_size: int) -> tuple[str, ...]:
    """Return the DeepSpeed presets that shard more of the training state than the preset of the spec.

    Returns an empty tuple if the spec has fsdp or a DeepSpeed config, if weights or moments are quantized (they cannot
    be sharded), or if a probe is set (gradients inside DeepSpeed cannot be reset).
    """
    current = spec.deepspeed.preset if spec.deepspeed else None
    has_quantized_weights = spec.lora is not None and spec.lora.quantization is not None
    is_quantized = has_quantized_weights or spec.training.optim == EIGHT_BIT_ADAMW
    has_other_sharding = spec.fsdp is not None or (spec.deepspeed is not None and current is None)
    if world_size == 1 or has_other_sharding or is_quantized or spec.training.probe:
        return ()
    presets = _LORA_SHARDING_PRESETS if spec.lora else _SHARDING_PRESETS
    level = _SHARDING_PRESETS.index(current.replace("zero2_offload", "zero2")) if current else -1
    return tuple(preset for preset in presets if _SHARDING_PRESETS.index(preset) > level)


_REPAIR_STEPS: dict[Reason, tuple[RepairStep, ...]] = {
    Reason.CUDA_OUT_OF_MEMORY: (
        _reduce_micro_batch,
        _enable_gradient_checkpointing,
        _enable_expandable_segments,
        _raise_sharding_level,
    ),
    Reason.HOST_OUT_OF_MEMORY: (_double_memory_limit, _reduce_loader_processes),
    Reason.SHARED_MEMORY_EXHAUSTED: (_double_shm_size, _reduce_loader_processes),
}
