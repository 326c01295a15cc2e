"""Which writers a run reports to, and what TensorBoard reads back."""

import importlib.util
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import SimpleNamespace

import pytest
from pydantic import ValidationError

from finetune_api.v1alpha1.training import REPORTERS, Training
from finetune_trainer.errors import InvalidSpec
from finetune_trainer.metrics import trackers as writers
from finetune_trainer.metrics.trackers import build_writers, chosen_writers


def training(*names: str) -> Training:
    return Training.model_validate({"reportTo": list(names)})


@pytest.fixture
def bare_image(monkeypatch: pytest.MonkeyPatch) -> None:
    """With TensorBoard and nothing else."""

    def find(name: str) -> ModuleSpec | None:
        return ModuleSpec(name, None) if name == "tensorboard" else None

    monkeypatch.setattr(importlib.util, "find_spec", find)


@pytest.mark.usefixtures("bare_image")
def test_tensorboard_is_what_a_job_reports_to_that_says_nothing() -> None:
    assert chosen_writers(Training()) == ("tensorboard",)
    assert chosen_writers(training("none")) == ()


def test_nobody_has_to_have_what_nobody_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)

    assert chosen_writers(Training()) == ()
    with pytest.raises(InvalidSpec, match="or report to none"):
        chosen_writers(training("tensorboard"))


@pytest.mark.usefixtures("bare_image")
@pytest.mark.parametrize("name", [name for name in REPORTERS if name != "tensorboard"])
def test_a_writer_whose_package_is_missing_is_named_and_what_there_is(name: str) -> None:
    with pytest.raises(InvalidSpec, match=f"reportTo: {name} needs the Python package .* tensorboard or none"):
        chosen_writers(training("tensorboard", name))


def test_none_beside_another_is_no_choice() -> None:
    with pytest.raises(ValidationError, match="none stands alone"):
        training("none", "tensorboard")


def test_every_writer_can_be_built() -> None:
    assert sorted(REPORTERS) == sorted((*writers._LOAD, "tensorboard"))


def test_steps_that_are_trained_again_replace_those_of_the_attempt_before(tmp_path: Path) -> None:
    accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")

    def attempt(first_step: int, last_step: int, loss: float) -> None:
        (writer,) = build_writers(("tensorboard",), logs=tmp_path, first_step=first_step)
        for step in range(first_step + 1, last_step + 1):
            state = SimpleNamespace(is_world_process_zero=True, global_step=step)
            writer.on_log(None, state, None, logs={"loss": loss, "tokens_per_second": 10.0, "eval_loss": 2.0})
        writer.on_train_end(None, None, None)

    attempt(0, 5, 1.0)
    attempt(3, 6, 0.5)

    read = accumulators.EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert sorted(read.Tags()["scalars"]) == ["eval/loss", "train/loss", "train/tokens_per_second"]
    told = [(event.step, event.value) for event in read.Scalars("train/loss")]
    assert told == [(1, 1.0), (2, 1.0), (3, 1.0), (4, 0.5), (5, 0.5), (6, 0.5)]
