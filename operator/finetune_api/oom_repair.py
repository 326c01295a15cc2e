"""What to change when memory ran out, so that the job fits and what it learns stays the same."""

from collections.abc import Callable
from dataclasses import dataclass

from finetune_api.batch import Batch
from finetune_api.v1alpha1.job import FineTuneJobSpec
from finetune_api.v1alpha1.parallelism import Deepspeed
from finetune_api.v1alpha1.pod_types import EnvVar
from finetune_api.v1alpha1.quantity import format_bytes, parse_quantity
from finetune_api.v1alpha1.reasons import Reason
from finetune_api.v1alpha1.status import Repair

ALLOCATOR = "PYTORCH_ALLOC_CONF"
_ALLOCATOR_BEFORE = "PYTORCH_CUDA_ALLOC_CONF"  # its older name, which torch still reads
_EXPANDABLE = "expandable_segments:True"
_PRESETS_OF_LORA = ("zero3", "zero3_offload")  # nearly all memory is the frozen model, which only stage 3 spreads
_PRESETS = ("zero1", "zero2", "zero3", "zero3_offload")


@dataclass(frozen=True)
class Shortage:
    """What ran out in an attempt of a job, and all that tells what else could be tried."""

    reason: Reason  # CudaOutOfMemory, HostOutOfMemory or SharedMemoryExhausted
    spec: FineTuneJobSpec  # as its user wrote it
    before: Repair | None  # with which the attempt ran
    batch: Batch | None  # of that attempt; None of a command, whose batches nobody else knows
    in_container: bool = True  # whose limits can be raised

    @property
    def trained(self) -> FineTuneJobSpec:
        """The spec of the attempt."""
        return apply_repair(self.spec, self.before)

    def changed(self, **fields: object) -> Repair:
        """The repairs so far and this one."""
        return (self.before or Repair()).model_copy(update=fields)


Step = Callable[[Shortage], tuple[Repair, str] | None]


def apply_repair(spec: FineTuneJobSpec, repair: Repair | None) -> FineTuneJobSpec:
    """The spec that is really trained; its effective batch is that of the one that was asked for."""
    if repair is None:
        return spec
    update: dict[str, object] = {}
    names = ("per_device_train_batch_size", "gradient_accumulation_steps", "gradient_checkpointing")
    if changed := {name: value for name in names if (value := getattr(repair, name)) is not None}:
        update["training"] = spec.training.model_copy(update=changed)
    if repair.expandable_segments:
        update["env"] = (*spec.env, EnvVar(name=ALLOCATOR, value=_EXPANDABLE))
    if repair.deepspeed is not None:
        update["deepspeed"] = Deepspeed.model_validate({"preset": repair.deepspeed})
    if repair.memory is not None:
        update["resources"] = spec.resources.with_memory(repair.memory)
    if repair.shm_size is not None:
        update["shm_size"] = repair.shm_size
    if repair.num_workers is not None and spec.dataset is not None:
        update["dataset"] = spec.dataset.model_copy(update={"num_workers": repair.num_workers})
    return spec.model_copy(update=update)


def next_repair(shortage: Shortage) -> tuple[Repair, str] | None:
    """The cheapest change that is left, with those before it, and what is new in words; None if nothing is left."""
    found = (step(shortage) for step in _LADDERS[shortage.reason])
    return next((each for each in found if each is not None), None)


def advise(shortage: Shortage) -> str:
    """What a person can do where nothing is left that the operator may change."""
    trained, by_user = shortage.trained, shortage.spec.command is not None
    loaders = "start fewer loader processes" + ("" if by_user else " (dataset.numWorkers)")
    if shortage.reason is Reason.CUDA_OUT_OF_MEMORY:
        smaller = by_user or not shortage.spec.restart_policy.max_restarts  # else nothing smaller is left
        return "use smaller batches, or larger or more GPUs" if smaller else shortage.reason.advice
    if not shortage.in_container:
        return f"{loaders}, or use a machine with more memory"
    if shortage.reason is Reason.SHARED_MEMORY_EXHAUSTED:
        return f"shared memory had {format_bytes(trained.shm_bytes)}: raise shmSize, or {loaders}"
    limit = trained.resources.limits.get("memory")
    if limit is None:
        return f"no limit was set and the Kubernetes node had no more: set resources.requests.memory, or {loaders}"
    allow = "" if trained.restart_policy.max_memory else " (restartPolicy.maxMemory lets the operator do so)"
    return f"the limit was {limit}: raise resources.limits.memory{allow}, or {loaders}"


def _more_memory(shortage: Shortage) -> tuple[Repair, str] | None:
    """Twice the limit, as far as the user lets it grow."""
    trained = shortage.trained
    limit, most = trained.resources.limits.get("memory"), trained.restart_policy.max_memory
    if limit is None or most is None or not shortage.in_container:
        return None
    now = parse_quantity(limit)
    larger = min(2 * now, parse_quantity(most))
    if larger <= now:
        return None
    memory = format_bytes(int(larger))
    return shortage.changed(memory=memory), f"resources.limits.memory {limit} -> {memory}"


def _larger_shm(shortage: Shortage) -> tuple[Repair, str] | None:
    """Twice the volume, once: what is written there counts against the container's memory limit besides."""
    trained = shortage.trained
    limit, now = trained.resources.limits.get("memory"), trained.shm_bytes
    larger = 2 * now if limit is None else min(2 * now, int(parse_quantity(limit)))
    once = shortage.before is not None and shortage.before.shm_size is not None
    if once or larger <= now or not shortage.in_container:
        return None
    size = format_bytes(larger)
    return shortage.changed(shm_size=size), f"shmSize {format_bytes(now)} -> {size}"


def _fewer_loaders(shortage: Shortage) -> tuple[Repair, str] | None:
    """One loader process per rank, then none; what they load, and in which order, stays the same."""
    dataset = shortage.trained.dataset
    if dataset is None or dataset.num_workers == 0:
        return None
    workers = 0 if dataset.num_workers == 1 else 1
    before = "default" if dataset.num_workers is None else dataset.num_workers
    return shortage.changed(num_workers=workers), f"dataset.numWorkers {before} -> {workers}"


def _smaller_micro_batches(shortage: Shortage) -> tuple[Repair, str] | None:
    """Half as many samples at a time, or the next number below that divides them, and so many times more often."""
    batch = shortage.batch
    if batch is None:
        return None
    smaller = next((size for size in range(batch.per_device // 2, 0, -1) if batch.per_device % size == 0), None)
    if smaller is None:
        return None
    accumulation = batch.accumulation * (batch.per_device // smaller)
    said = (
        f"perDeviceTrainBatchSize {batch.per_device} -> {smaller}, gradientAccumulationSteps {batch.accumulation} ->"
        f" {accumulation} (effective batch stays {batch.effective})"
    )
    return shortage.changed(per_device_train_batch_size=smaller, gradient_accumulation_steps=accumulation), said


def _checkpointing(shortage: Shortage) -> tuple[Repair, str] | None:
    if shortage.batch is None or shortage.trained.training.gradient_checkpointing:
        return None
    return shortage.changed(gradient_checkpointing=True), "gradientCheckpointing: true"


def _expandable_segments(shortage: Shortage) -> tuple[Repair, str] | None:
    given = any(variable.name in (ALLOCATOR, _ALLOCATOR_BEFORE) for variable in shortage.trained.env)
    if shortage.batch is None or given:
        return None
    return shortage.changed(expandable_segments=True), f"{ALLOCATOR}={_EXPANDABLE}"


def _spread(shortage: Shortage) -> tuple[Repair, str] | None:
    spec, batch = shortage.trained, shortage.batch
    presets = further_presets(spec, world_size=batch.world_size) if batch else ()
    if not presets:
        return None
    own = spec.deepspeed.preset if spec.deepspeed else "none"
    return shortage.changed(deepspeed=presets[0]), f"deepspeed preset {own} -> {presets[0]}"


def further_presets(spec: FineTuneJobSpec, *, world_size: int) -> tuple[str, ...]:
    """Of DeepSpeed, that spread more than the job does, unless its user chose another way to spread.

    Weights in 4 bits do not spread, and DeepSpeed's gradients cannot be undone after a probe.
    """
    own = spec.deepspeed.preset if spec.deepspeed else None
    packed = spec.lora is not None and spec.lora.quantization is not None
    another = spec.fsdp is not None or (spec.deepspeed is not None and own is None)
    if world_size == 1 or another or packed or spec.training.probe:
        return ()
    presets = _PRESETS_OF_LORA if spec.lora else _PRESETS
    now = _PRESETS.index(own.replace("zero2_offload", "zero2")) if own else -1
    return tuple(preset for preset in presets if _PRESETS.index(preset) > now)


_LADDERS: dict[Reason, tuple[Step, ...]] = {
    Reason.CUDA_OUT_OF_MEMORY: (_smaller_micro_batches, _checkpointing, _expandable_segments, _spread),
    Reason.HOST_OUT_OF_MEMORY: (_more_memory, _fewer_loaders),
    Reason.SHARED_MEMORY_EXHAUSTED: (_larger_shm, _fewer_loaders),
}
