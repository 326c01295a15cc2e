"""Experiment trackers that receive the training log: TensorBoard, Weights & Biases, MLflow, SwanLab."""

import importlib.util
import secrets
from pathlib import Path

from transformers import TrainerCallback

from finetune_api.v1alpha1.training import REPORTERS, Training
from finetune_supervisor.safe_files import open_folder
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


def build_tracker(name: str, *, logs: Path, first_step: int) -> TrainerCallback:
    """Build a tracker callback. Called on rank 0 only, because importing its package may take seconds."""
    from transformers import integrations

    if name in _CALLBACKS:
        return getattr(integrations, _CALLBACKS[name])()
    from torch.utils.tensorboard import SummaryWriter

    callback, folder = integrations.TensorBoardCallback(), logs / "tensorboard"
    with open_folder(folder):
        suffix = f".{secrets.token_hex(8)}"  # others know the rest of the name, and could make it a link
    # The first event creates the files; purge_step hides entries of an earlier attempt for steps that are repeated.
    callback._SummaryWriter = lambda **_: SummaryWriter(str(folder), purge_step=first_step + 1, filename_suffix=suffix)
    return callback
