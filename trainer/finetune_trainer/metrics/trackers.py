"""TensorBoard, Weights & Biases, MLflow and SwanLab: where the numbers of the log go besides the log."""

import importlib.util
from collections.abc import Callable, Iterable
from pathlib import Path

from transformers import TrainerCallback

from finetune_api.v1alpha1.training import REPORTERS, Training
from finetune_trainer.errors import InvalidSpec

NONE = "none"
_DEFAULT = "tensorboard"


def chosen_writers(training: Training) -> tuple[str, ...]:
    """Raises InvalidSpec for one whose package the image lacks; asked before anything large is read."""
    have = [name for name in REPORTERS if importlib.util.find_spec(name) is not None]
    if training.report_to is None:
        return tuple(name for name in have if name == _DEFAULT)
    wanted = tuple(name for name in training.report_to if name != NONE)
    for name in wanted:
        if name not in have:
            raise InvalidSpec(
                f"spec.training.reportTo: {name} needs the Python package of that name, which the image does not have;"
                f" set spec.image to one that has it, or report to {' or '.join((*have, NONE))}"
            )
    return wanted


def build_writers(names: Iterable[str], *, logs: Path, first_step: int) -> tuple[TrainerCallback, ...]:
    """On rank 0 only. The packages take up to seconds to import, so nobody else does."""
    return tuple(_tensorboard(logs, first_step) if name == "tensorboard" else _LOAD[name]() for name in names)


def _tensorboard(logs: Path, first_step: int) -> TrainerCallback:
    from torch.utils.tensorboard import SummaryWriter
    from transformers.integrations import TensorBoardCallback

    # what an earlier attempt told of steps that are now trained again is not shown
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


_LOAD: dict[str, Callable[[], TrainerCallback]] = {"wandb": _wandb, "mlflow": _mlflow, "swanlab": _swanlab}
