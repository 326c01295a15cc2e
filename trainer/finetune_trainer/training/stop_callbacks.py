"""Callbacks that end training: on a stop request, and on a loss that is not finite."""

from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from finetune_trainer.errors import NonFiniteLoss
from finetune_trainer.training.base_trainer import GlobalMeanTrainer


class NonFiniteLossCallback(TrainerCallback):  # type: ignore[misc]
    """Raises NonFiniteLoss before such a step is logged or saved.

    Only the rank with the loss raises: it ends the job, while the others wait in a collective.
    """

    def __init__(self, trainer: GlobalMeanTrainer) -> None:
        self._trainer = trainer

    def on_step_end(self, _args: TrainingArguments, state: TrainerState, _control: TrainerControl, **_: Any) -> None:
        if not self._trainer.is_loss_finite():
            raise NonFiniteLoss(
                f"the loss is not finite at step {state.global_step}; lower training.learningRate, add"
                " training.warmupSteps, or look for broken rows"
            )


class StopRequestCallback(TrainerCallback):  # type: ignore[misc]
    """Saves a checkpoint and stops after the step in which all ranks learned of a stop request."""

    def __init__(self, trainer: GlobalMeanTrainer) -> None:
        self._trainer = trainer

    def on_step_end(self, _args: TrainingArguments, _state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if self._trainer.stop_agreed:
            control.should_save = True
            control.should_training_stop = True
