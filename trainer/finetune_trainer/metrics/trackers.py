"""Experiment trackers that receive the training log: TensorBoard, Weights & Biases, MLflow, SwanLab."""

import importlib.util
from collections.abc import Iterable
from pathlib import Path

from transformers import TrainerCallback

from finetune_api.v1alpha1.training import REPORTERS, Training
from finetune_trainer.errors import InvalidSpec

NONE = "none"
_DEFAULT = "tensorboard"
_CALLBACKS = {"wandb": "WandbCallback", "mlflow": "MLflowCallback", "swanlab": "SwanLabCallback"}


def select_trackers(training: Training) -> tuple[str, ...]:
    """Return the names of the trackers to report to, by default TensorBoard if it is installed.

    Called before the model is loaded, to fail early. Raises InvalidSpec if the image lacks a tracker's package.
    """
    installed = [name for name in REPORTERS if importlib.util.find_spec(name) is not None]
    if training.report_to is None:
        return tuple(name for name in installed if name == _DEFAULT)
    requested_names = tuple(name for name in training.report_to if name != NONE)
    for name in requested_names:
        if name not in installed:
            raise InvalidSpec(
                f"spec.training.reportTo: {name} needs the Python package of that name, which the image does not have;"
                f" set spec.image to one that has it, or report to {' or '.join((*installed, NONE))}"
            )
    return requested_names


def build_trackers(names: Iterable[str], *, logs: Path, first_step: int) -> tuple[TrainerCallback, ...]:
    """Build the tracker callbacks. Called on rank 0 only, because importing their packages may take seconds."""
    from transformers import integrations

    return tuple(
        getattr(integrations, _CALLBACKS[name])()
        if name in _CALLBACKS
        else _build_tensorboard_callback(logs, first_step)
        for name in names
    )


def _build_tensorboard_callback(logs: Path, first_step: int) -> TrainerCallback:
    from torch.utils.tensorboard import SummaryWriter
    from transformers.integrations import TensorBoardCallback

    # purge_step hides the entries of an earlier attempt for steps that are trained again
    folder = str(logs / "tensorboard")
    return TensorBoardCallback(SummaryWriter(folder, purge_step=first_step + 1))
