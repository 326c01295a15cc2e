"""What is tried before the first step, and leaves nothing behind."""

from typing import Any

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from finetune_trainer.data.order import PackOrder
from finetune_trainer.data.packing import POSITIONS
from finetune_trainer.errors import InvalidSpec
from finetune_trainer.methods.exact import ExactTrainer
from finetune_trainer.methods.sft import predict

_NOTICEABLE = 1e-3  # of the largest logit; a row that is read by its neighbour changes far more


class Rehearse(TrainerCallback):  # type: ignore[misc]
    """On every rank, with the model as it will be trained."""

    def __init__(self, trainer: ExactTrainer) -> None:
        self._trainer = trainer

    def on_train_begin(
        self, _args: TrainingArguments, _state: TrainerState, _control: TrainerControl, **_: Any
    ) -> None:
        with self._trainer.rehearsing():
            if isinstance(self._trainer.parts.data.order, PackOrder):
                check_packs(
                    self._trainer.model_wrapped, self._trainer.args.device, name=self._trainer.parts.spec.model.name
                )


@torch.no_grad()
def check_packs(model: torch.nn.Module, device: torch.device, *, name: str) -> None:
    """Raises InvalidSpec if what the first row of a pack says changes what is predicted in the second."""
    trained = model.training
    model.eval()
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3]], device=device)
    try:
        one, other = (
            predict(model, {"input_ids": torch.tensor([[*first, 8, 9, 10, 11]], device=device), POSITIONS: positions})
            for first in ((0, 1, 2, 3), (4, 5, 6, 7))
        )
    except TypeError as error:
        raise InvalidSpec(f'spec.dataset.packing: model "{name}" takes no positions ({error}); leave it out') from error
    model.train(trained)
    change = (one[:, 4:] - other[:, 4:]).abs().max() / one[:, 4:].abs().max()
    if change > _NOTICEABLE:
        raise InvalidSpec(
            f'spec.dataset.packing: the rows of a pack are not kept apart by model "{name}", which carries something'
            " over from one to the next; leave packing out"
        )
