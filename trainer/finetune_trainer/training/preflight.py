"""What is tried before the first step, and leaves nothing behind."""

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from finetune_trainer.data.epoch_order import Item, PackOrder
from finetune_trainer.data.length_stats import costliest, name_rows
from finetune_trainer.data.packing import AXES, POSITIONS
from finetune_trainer.data.token_dataset import Features
from finetune_trainer.distributed.heartbeat_writer import peak_memory_bytes
from finetune_trainer.errors import InvalidSpec
from finetune_trainer.memory.gpus import GIB
from finetune_trainer.methods.sft import predict
from finetune_trainer.training.base_trainer import ExactTrainer

_NOTICEABLE = 1e-3  # of the largest logit; a row that is read by its neighbour changes far more


class Rehearse(TrainerCallback):  # type: ignore[misc]
    """On every rank, with the model as it will be trained."""

    def __init__(self, trainer: ExactTrainer) -> None:
        self._trainer = trainer

    def on_train_begin(
        self, _args: TrainingArguments, _state: TrainerState, _control: TrainerControl, **_: Any
    ) -> None:
        trainer, spec = self._trainer, self._trainer.parts.spec
        with trainer.rehearsing():
            if isinstance(trainer.parts.data.order, PackOrder):
                rows = min(trainer.parts.batch.per_device, 2)
                vision = trainer.parts.data.vision
                axes = vision is not None and vision.family.has_axes
                packs = two_rows_each(rows, trainer.args.device, axes=axes)
                check_packs(trainer.model_wrapped, packs, name=spec.model.name)
            if spec.training.probe:
                probe(trainer)


def two_rows_each(packs: int, device: torch.device, *, axes: bool) -> tuple[Features, Features]:
    """Micro-batches of so many packs that differ in the first row of each, and not in the second."""
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3]] * packs, device=device)
    shared = {POSITIONS: positions, **({AXES: positions.unsqueeze(2).expand(-1, -1, 3)} if axes else {})}
    one, other = (
        torch.tensor([[*first, 8, 9, 10, 11]] * packs, device=device) for first in ((0, 1, 2, 3), (4, 5, 6, 7))
    )
    return {"input_ids": one, **shared}, {"input_ids": other, **shared}


@torch.no_grad()
def check_packs(model: torch.nn.Module, packs: tuple[Features, Features], *, name: str) -> None:
    """Raises InvalidSpec if what the first row of a pack says changes what is predicted in the second.

    As many packs as in a micro-batch, or two: some kernels tell a pack by its positions only where it is alone.
    """
    trained = model.training
    model.eval()
    try:
        one, other = (predict(model, batch) for batch in packs)
    except TypeError as error:
        raise InvalidSpec(f'spec.dataset.packing: model "{name}" takes no positions ({error}); leave it out') from error
    model.train(trained)
    change = (one[:, 4:] - other[:, 4:]).abs().max() / one[:, 4:].abs().max()
    if change > _NOTICEABLE:
        raise InvalidSpec(
            f'spec.dataset.packing: the rows of a pack are not kept apart by model "{name}", which carries something'
            " over from one to the next; leave packing out"
        )


def forward_and_backward(trainer: ExactTrainer, model: torch.nn.Module, items: Sequence[Item]) -> None:
    """One micro-batch of these, as in a step."""
    parts = trainer.parts
    inputs = trainer._prepare_inputs(parts.collate([parts.data.samples[item] for item in items]))
    torch.stack(trainer.summed_losses(model, inputs)).sum().backward()  # type: ignore[no-untyped-call]


def probe(trainer: ExactTrainer) -> None:
    """Forward and backward of the costliest micro-batch, so that too little memory shows now and not after hours."""
    parts = trainer.parts
    items = costliest(parts.data.order, parts.batch.per_device)
    if parts.ranks.is_first:  # before it runs, so that the log names the rows if memory is too small
        print(f"probe: the costliest micro-batch: {', '.join(name_rows(parts.data.train, items))}", flush=True)
    model = trainer.model_wrapped.train()
    # With its gradients exchanged, DDP would group them anew and change the order of additions in the steps to come.
    alone = model.no_sync() if isinstance(model, DistributedDataParallel) else nullcontext()
    with alone:
        forward_and_backward(trainer, model, items)
    if parts.ranks.is_first:
        print(f"probe: it fits; peak memory {peak_memory_bytes() / GIB:.2f} GiB before optimizer states", flush=True)
