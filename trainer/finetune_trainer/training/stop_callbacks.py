"""Callbacks that stop training on a stop request or a non-finite loss."""

from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from finetune_trainer.errors import NonFiniteLoss
from finetune_trainer.training.base_trainer import GlobalMeanTrainer


class NonFiniteLossCallback(TrainerCallback):  # type: ignore[misc]
    """Raises NonFiniteLoss before a non-finite loss is logged or a checkpoint is saved after it.

    Other steps are not checked, because a check waits for the GPU. Only the affected rank raises the error. This ends
    the job, although the other ranks wait in a collective.
    """

    def __init__(self, trainer: GlobalMeanTrainer) -> None:
        self._trainer = trainer

    def on_step_end(self, _args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        is_checked = control.should_log or control.should_save or control.should_training_stop
        if is_checked and not self._trainer.is_loss_finite():
            raise NonFiniteLoss(
                f"the loss is not finite at step {state.global_step}; lower training.learningRate, add"
                " training.warmupSteps, or look for broken rows"
            )


class StopRequestCallback(TrainerCallback):  # type: ignore[misc]
    """Saves a checkpoint and stops after the step in which all ranks agreed to stop."""

    def __init__(self, trainer: GlobalMeanTrainer) -> None:
        self._trainer = trainer

    def on_step_end(self, _args: TrainingArguments, _state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if self._trainer.stop_agreed:
            control.should_save = True
            control.should_training_stop = True
