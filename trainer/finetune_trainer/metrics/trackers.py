"""Experiment trackers that receive the log besides the log file: TensorBoard, Weights & Biases, MLflow, SwanLab."""

import importlib.util
from collections.abc import Callable, Iterable
from pathlib import Path

from transformers import TrainerCallback

from finetune_api.v1alpha1.training import REPORTERS, Training
from finetune_trainer.errors import InvalidSpec

NONE = "none"
_DEFAULT = "tensorboard"


def select_trackers(training: Training) -> tuple[str, ...]:
    """Return the names of the trackers to report to, by default TensorBoard if it is installed.

    Called before the model is loaded, to fail early. Raises InvalidSpec if the image lacks a tracker's package.
    """
    installed = [name for name in REPORTERS if importlib.util.find_spec(name) is not None]
    if training.report_to is None:
        return tuple(name for name in installed if name == _DEFAULT)
    requested = tuple(name for name in training.report_to if name != NONE)
    for name in requested:
        if name not in installed:
            raise InvalidSpec(
                f"spec.training.reportTo: {name} needs the Python package of that name, which the image does not have;"
                f" set spec.image to one that has it, or report to {' or '.join((*installed, NONE))}"
            )
    return requested


def build_trackers(names: Iterable[str], *, logs: Path, first_step: int) -> tuple[TrainerCallback, ...]:
    """Build the callbacks of the trackers, on rank 0 only, as importing their packages may take seconds."""
    return tuple(_tensorboard(logs, first_step) if name == "tensorboard" else _BUILDERS[name]() for name in names)


def _tensorboard(logs: Path, first_step: int) -> TrainerCallback:
    from torch.utils.tensorboard import SummaryWriter
    from transformers.integrations import TensorBoardCallback

    # purge_step hides what an earlier attempt logged about steps that are now trained again
    folder = str(logs / "tensorboard")
    return TensorBoardCallback(SummaryWriter(folder, purge_step=first_step + 1))


def _wandb() -> TrainerCallback:
    from transformers.integrations import WandbCallback

    return WandbCallback()


def _mlflow() -> TrainerCallback:
    from transformers.integrations import MLflowCallback

    return MLflowCallback()


def _swanlab() -> TrainerCallback:
    from transformers.integrations import SwanLabCallback

    return SwanLabCallback()


_BUILDERS: dict[str, Callable[[], TrainerCallback]] = {"wandb": _wandb, "mlflow": _mlflow, "swanlab": _swanlab}
