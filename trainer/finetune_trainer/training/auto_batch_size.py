"""Choose the largest micro-batch that fits into memory, for perDeviceTrainBatchSize auto."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch

from finetune_api.batch import Batch, find_batch_split, find_largest_fitting_batch, list_batch_splits
from finetune_api.v1alpha1.job import TrainerSpec
from finetune_api.v1alpha1.training import EIGHT_BIT_ADAMW
from finetune_supervisor.contract import parse_json
from finetune_trainer.atomic_files import write_json
from finetune_trainer.checkpoint.output_folder import OutputFolder
from finetune_trainer.data.length_stats import select_costliest_items
from finetune_trainer.distributed.collectives import all_gather_numbers
from finetune_trainer.distributed.devices import get_device_name
from finetune_trainer.errors import CudaOutOfMemory, TrainerError, first_line
from finetune_trainer.foreign_files import read_regular_file
from finetune_trainer.memory.breakdown import FRAGMENTATION, MemoryBreakdown
from finetune_trainer.memory.model_shape import ADAMW_STATES, count_eight_bit_moment_bytes
from finetune_trainer.parallel.parallelism import describe_parallelism
from finetune_trainer.training.base_trainer import GlobalMeanTrainer
from finetune_trainer.training.preflight import run_forward_and_backward
from finetune_trainer.units import GIB

_FILE = "batch.json"

ForecastMemory = Callable[[Batch], MemoryBreakdown | TrainerError]


@dataclass(frozen=True)
class BatchChoice:
    """The chosen batch, and the reason why no larger micro-batch was chosen."""

    batch: Batch
    reason: str


@dataclass(frozen=True)
class SavedBatchSize:
    """The chosen micro-batch size, saved next to the checkpoints so that later attempts reuse it.

    It is reused only if `cache_key` is unchanged. Only rank 0 reads and writes the file.
    """

    output: OutputFolder
    cache_key: dict[str, Any]

    def load(self, smallest_batch: Batch) -> BatchChoice | None:
        """Return the saved choice, or None if there is none for this cache key and effective batch."""
        with suppress(OSError, ValueError, KeyError, TypeError):
            saved_values = parse_json(read_regular_file(self.output.checkpoints / _FILE))
            batch = find_batch_split(smallest_batch, saved_values["perDevice"])
            if batch is not None and saved_values["circumstances"] == self.cache_key:
                return BatchChoice(batch, "as in an earlier attempt")
        return None

    def save(self, choice: BatchChoice) -> None:
        """Save the choice. Raises OutputError if a newer attempt owns the output."""
        with self.output.writing():
            saved_values = {
                "perDevice": choice.batch.micro_batch_size,
                "why": choice.reason,
                "circumstances": self.cache_key,
            }
            write_json(self.output.checkpoints / _FILE, saved_values)


def build_cache_key(spec: TrainerSpec, device: torch.device, *, world_size: int) -> dict[str, Any]:
    """Return the settings that affect memory use but are not part of the job's fingerprint."""
    return {
        "worldSize": world_size,
        "device": get_device_name(device),
        "parallelism": describe_parallelism(spec),
        "recomputationInterval": spec.training.recomputation_interval,
    }


def can_run_batch_size_trial(spec: TrainerSpec, device: torch.device) -> bool:
    """Return whether micro-batch sizes can be tried before training.

    Only GPUs support trials: if host memory runs out, the kernel kills the process instead of raising an error. A
    trial with DeepSpeed or FSDP2 cannot be undone.
    """
    return device.type == "cuda" and spec.deepspeed is None and spec.fsdp is None


def choose_by_forecast(smallest_batch: Batch, forecast_memory: ForecastMemory, *, available_bytes: int) -> BatchChoice:
    """Return the largest micro-batch whose forecast fits into `available_bytes` per rank.

    If none fits or there is no forecast, return the smallest batch. Runs on rank 0, on behalf of all ranks.
    """
    forecast_bytes: dict[Batch, int] = {}

    def fits(batch: Batch) -> bool:
        breakdown = forecast_memory(batch)
        if not isinstance(breakdown, MemoryBreakdown):
            raise _NoForecast(breakdown)
        forecast_bytes[batch] = breakdown.total
        return breakdown.total <= available_bytes

    try:
        batch = find_largest_fitting_batch(list_batch_splits(smallest_batch), fits)
    except _NoForecast as error:
        return BatchChoice(smallest_batch, f"the memory of larger sizes cannot be forecast: {error}")
    limit = f"{available_bytes / GIB:.2f} GiB per rank"
    if batch is None:
        needed_gib = forecast_bytes[smallest_batch] / GIB
        return BatchChoice(smallest_batch, f"even this is forecast to need {needed_gib:.2f} of {limit}")
    next_larger = _describe_next_larger(forecast_bytes, batch)
    return BatchChoice(batch, f"forecast to need {forecast_bytes[batch] / GIB:.2f} of {limit}{next_larger}")


class _NoForecast(Exception):
    """Raised if the memory of a batch cannot be forecast; the argument is the reason."""


def _describe_next_larger(forecast_bytes: dict[Batch, int], chosen_batch: Batch) -> str:
    """Describe the smallest size that does not fit, if one was forecast."""
    larger_batches = [batch for batch in forecast_bytes if batch.micro_batch_size > chosen_batch.micro_batch_size]
    if not larger_batches:
        return "; it is the largest possible size"
    next_larger = min(larger_batches, key=lambda batch: batch.micro_batch_size)
    return f", {next_larger.micro_batch_size} would need {forecast_bytes[next_larger] / GIB:.2f}"


def choose_by_trial(trainer: GlobalMeanTrainer) -> BatchChoice:
    """Return the largest micro-batch whose forward and backward pass fits on every rank (collective).

    Runs the most expensive micro-batches while memory for later allocations is reserved. The trainer must be built with
    the smallest batch, and must not train afterwards, because DDP has rebuilt its buckets. Raises CudaOutOfMemory if
    not even one sample fits.
    """
    inputs, device = trainer.inputs, trainer.args.device
    *larger_batches, smallest = list_batch_splits(inputs.plan.batch)
    with trainer.discard_side_effects(), _prepare_model_temporarily(trainer) as model:

        def run_trial(batch: Batch) -> None:
            run_forward_and_backward(trainer, model, select_costliest_items(inputs.data.order, batch.micro_batch_size))

        def fits(batch: Batch) -> bool:
            fits_locally = True
            try:
                run_trial(batch)
            except torch.OutOfMemoryError:
                fits_locally = False
            _release_trial_memory(device)
            return all(fits_on_rank for (fits_on_rank,) in all_gather_numbers((float(fits_locally),)))

        try:
            reserved_tensors = reserve_training_memory(
                model,
                device,
                world_size=inputs.ranks.world_size,
                has_eight_bit_moments=trainer.args.optim == EIGHT_BIT_ADAMW,
            )
            run_trial(smallest)  # the first run allocates kernel workspaces, which are never freed
        except torch.OutOfMemoryError as error:
            raise CudaOutOfMemory(
                f"ran out of GPU memory before the first step, with one sample at a time: {first_line(error)}"
            ) from error
        chosen_batch = find_largest_fitting_batch(larger_batches, fits) or smallest
        del reserved_tensors
    _release_trial_memory(device)
    too_large_sizes = [
        batch.micro_batch_size for batch in larger_batches if batch.micro_batch_size > chosen_batch.micro_batch_size
    ]
    reason = (
        f"tried with the longest rows, {min(too_large_sizes)} do not fit"
        if too_large_sizes
        else "the largest possible size"
    )
    return BatchChoice(chosen_batch, reason)


def reserve_training_memory(
    model: torch.nn.Module, device: torch.device, *, world_size: int, has_eight_bit_moments: bool = False
) -> list[torch.Tensor]:
    """Allocate the memory that a real step needs besides activations; the caller keeps the returned tensors alive.

    It consists of gradients, optimizer states, DDP buckets and, on a GPU, a share lost to fragmentation.
    """
    trained_parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in trained_parameters:
        parameter.grad = torch.zeros_like(parameter)
    copies = (0 if has_eight_bit_moments else ADAMW_STATES) + (world_size > 1)
    reserved_tensors = [torch.empty_like(parameter) for parameter in trained_parameters for _ in range(copies)]
    if has_eight_bit_moments:
        reserved_tensors.append(torch.empty(count_eight_bit_moment_bytes(model), dtype=torch.uint8, device=device))
    if device.type == "cuda":
        fragmentation_bytes = int(FRAGMENTATION * torch.cuda.mem_get_info(device)[1])
        reserved_tensors.append(torch.empty(fragmentation_bytes, dtype=torch.uint8, device=device))
    return reserved_tensors


@contextmanager
def _prepare_model_temporarily(trainer: GlobalMeanTrainer) -> Iterator[torch.nn.Module]:
    """Enable mixed precision and activation checkpointing in the `with` block, and restore the model afterwards.

    accelerate's own function for this would also remove the `forward` wrappers of transformers.
    """
    model = trainer.model
    names = ("forward", "_original_forward", "_is_accelerate_prepared")
    original_attributes = {name: model.__dict__[name] for name in names if name in model.__dict__}
    if trainer.args.activation_checkpointing:
        model.activation_checkpointing_enable(trainer.args.activation_checkpointing_kwargs)
    yield trainer.accelerator.prepare_model(model, evaluation_mode=True).train()
    for name in names:
        model.__dict__.pop(name, None)
    model.__dict__.update(original_attributes)


def _release_trial_memory(device: torch.device) -> None:
    """Free the memory of a trial and reset the memory peak, so that the run reports its own peak."""
    gc.collect()  # a failed pass may leave reference cycles
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
