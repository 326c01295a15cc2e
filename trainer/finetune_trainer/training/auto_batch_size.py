"""perDeviceTrainBatchSize auto: as many samples at a time as fit into memory, whose number changes nothing else."""

import gc
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch

from finetune_api.batch import Batch, largest_that_fits, split_by, splits
from finetune_api.v1alpha1.job import TrainerSpec
from finetune_trainer.atomic_files import explained, write_json
from finetune_trainer.checkpoint.output_folder import Output
from finetune_trainer.data.length_stats import costliest
from finetune_trainer.distributed.collectives import device_name, gather_numbers
from finetune_trainer.errors import CudaOutOfMemory, TrainerError, first_line
from finetune_trainer.memory.breakdown import ADAMW_STATES, FRAGMENTATION, Parts
from finetune_trainer.memory.gpus import GIB
from finetune_trainer.parallel.presets import describe_parallelism
from finetune_trainer.training.base_trainer import ExactTrainer
from finetune_trainer.training.preflight import forward_and_backward

_FILE = "batch.json"

Expect = Callable[[Batch], Parts | TrainerError]


@dataclass(frozen=True)
class Choice:
    """A batch, and why no larger one."""

    batch: Batch
    why: str


@dataclass(frozen=True)
class Kept:
    """What was chosen, beside the checkpoints: an attempt that goes on under the same circumstances takes the same.

    On rank 0 only.
    """

    output: Output
    circumstances: dict[str, Any]

    def find(self, smallest: Batch) -> Choice | None:
        with suppress(OSError, ValueError, KeyError, TypeError):
            found = json.loads((self.output.checkpoints / _FILE).read_text(encoding="utf-8"))
            batch = split_by(smallest, found["perDevice"])
            if batch is not None and found["circumstances"] == self.circumstances:
                return Choice(batch, "as in an attempt before")
        return None

    def keep(self, choice: Choice) -> None:
        with explained(self.output.root):
            self.output.assert_holder()
            chosen = {"perDevice": choice.batch.per_device, "why": choice.why, "circumstances": self.circumstances}
            write_json(self.output.checkpoints / _FILE, chosen)


def circumstances(spec: TrainerSpec, device: torch.device, *, world_size: int) -> dict[str, Any]:
    """What decides how much fits, beside what the fingerprint of a job holds."""
    return {
        "worldSize": world_size,
        "device": device_name(device),
        "parallelism": describe_parallelism(spec),
        "gradientCheckpointing": spec.training.gradient_checkpointing,
    }


def is_measurable(spec: TrainerSpec, device: torch.device) -> bool:
    """A GPU says when its memory is full; a machine kills. What is spread over the ranks cannot be tried and undone."""
    return device.type == "cuda" and spec.deepspeed is None and spec.fsdp is None


def choose_by_forecast(smallest: Batch, expect: Expect, *, available: int) -> Choice:
    """The largest that is forecast to fit; the smallest where that cannot be told. On one rank, for all."""
    needed: dict[Batch, int] = {}

    def fits(batch: Batch) -> bool:
        expected = expect(batch)
        if not isinstance(expected, Parts):
            raise _Unknown(expected)
        needed[batch] = expected.total
        return expected.total <= available

    try:
        batch = largest_that_fits(splits(smallest), fits)
    except _Unknown as unknown:
        return Choice(smallest, f"what more would need cannot be forecast: {unknown}")
    there = f"{available / GIB:.2f} GiB of a rank"
    if batch is None:
        return Choice(smallest, f"even that is forecast to need {needed[smallest] / GIB:.2f} of {there}")
    return Choice(batch, f"forecast to need {needed[batch] / GIB:.2f} of {there}{_larger(needed, batch)}")


class _Unknown(Exception):
    """What a batch needs."""


def _larger(needed: dict[Batch, int], chosen: Batch) -> str:
    """The next size that was looked at, for which there is no room."""
    above = [batch for batch in needed if batch.per_device > chosen.per_device]
    if not above:
        return "; it is all that a rank has"
    next_one = min(above, key=lambda batch: batch.per_device)
    return f", {next_one.per_device} would need {needed[next_one] / GIB:.2f}"


def choose_by_trial(trainer: ExactTrainer) -> Choice:
    """Forward and backward of the costliest micro-batches there can be, with room kept for what comes with the steps.

    The trainer is built with the smallest batch and will not train: DDP would regroup its buckets. Every rank takes
    part; what does not fit on one is too much for all. Raises CudaOutOfMemory if not even one sample fits.
    """
    parts, device = trainer.parts, trainer.args.device
    *larger, smallest = splits(parts.batch)
    with trainer.rehearsing(), _as_in_a_step(trainer) as model:

        def attempt(batch: Batch) -> None:
            forward_and_backward(trainer, model, costliest(parts.data.order, batch.per_device))

        def fits(batch: Batch) -> bool:
            mine = True
            try:
                attempt(batch)
            except torch.OutOfMemoryError:
                mine = False
            _forget(device)
            return all(fitted for (fitted,) in gather_numbers((float(mine),), device))

        try:
            room = keep_room(model, device, world_size=parts.ranks.world_size)
            attempt(smallest)  # first: it makes what kernels keep for ever
        except torch.OutOfMemoryError as error:
            raise CudaOutOfMemory(
                f"ran out of GPU memory before the first step, with one sample at a time: {first_line(error)}"
            ) from error
        chosen = largest_that_fits(larger, fits) or smallest
        del room
    _forget(device)
    above = [batch.per_device for batch in larger if batch.per_device > chosen.per_device]
    return Choice(
        chosen, f"tried with the longest rows, {min(above)} do not fit" if above else "all that a rank has fit"
    )


def keep_room(model: torch.nn.Module, device: torch.device, *, world_size: int) -> list[torch.Tensor]:
    """Gradients as of a micro-batch before, and as much as optimizer states, DDP's buckets and gaps will take."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in trained:
        parameter.grad = torch.zeros_like(parameter)
    copies = ADAMW_STATES + (world_size > 1)
    room = [torch.empty_like(parameter) for parameter in trained for _ in range(copies)]
    if device.type == "cuda":
        gaps = int(FRAGMENTATION * torch.cuda.mem_get_info(device)[1])
        room.append(torch.empty(gaps, dtype=torch.uint8, device=device))
    return room


@contextmanager
def _as_in_a_step(trainer: ExactTrainer) -> Iterator[torch.nn.Module]:
    """The model in the precision of a training, and with its checkpointing.

    Undone by hand: accelerate's way also strips what transformers has wrapped around a model's forward.
    """
    model = trainer.model
    names = ("forward", "_original_forward", "_is_accelerate_prepared")
    before = {name: model.__dict__[name] for name in names if name in model.__dict__}
    if trainer.args.activation_checkpointing:
        model.activation_checkpointing_enable(trainer.args.activation_checkpointing_kwargs)
    yield trainer.accelerator.prepare_model(model, evaluation_mode=True).train()
    for name in names:
        model.__dict__.pop(name, None)
    model.__dict__.update(before)


def _forget(device: torch.device) -> None:
    """Nothing that was tried takes memory any more, or counts as the peak of the run."""
    gc.collect()  # what a failed pass leaves may hold itself
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
