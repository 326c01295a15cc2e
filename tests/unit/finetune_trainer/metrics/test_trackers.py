"""Test the selection of trackers, and the TensorBoard events of a resumed run."""

import importlib.util
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import SimpleNamespace

import pytest
from pydantic import ValidationError

from finetune_api.v1alpha1.training import REPORTERS, Training
from finetune_trainer.errors import InvalidSpec
from finetune_trainer.metrics import trackers
from finetune_trainer.metrics.trackers import build_tracker, select_trackers


def build_training(*tracker_names: str) -> Training:
    return Training.model_validate({"reportTo": list(tracker_names)})


@pytest.fixture
def only_tensorboard_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def find_spec(name: str) -> ModuleSpec | None:
        return ModuleSpec(name, None) if name == "tensorboard" else None

    monkeypatch.setattr(importlib.util, "find_spec", find_spec)


@pytest.mark.usefixtures("only_tensorboard_installed")
def test_tensorboard_is_the_default() -> None:
    assert select_trackers(Training()) == ("tensorboard",)
    assert select_trackers(build_training("none")) == ()


def test_default_is_no_tracker_without_tensorboard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)

    assert select_trackers(Training()) == ()
    with pytest.raises(InvalidSpec, match="or report to none"):
        select_trackers(build_training("tensorboard"))


@pytest.mark.usefixtures("only_tensorboard_installed")
@pytest.mark.parametrize("name", [name for name in REPORTERS if name != "tensorboard"])
def test_error_about_a_missing_package_names_the_installed_trackers(name: str) -> None:
    with pytest.raises(InvalidSpec, match=f"reportTo: {name} needs the Python package .* tensorboard or none"):
        select_trackers(build_training("tensorboard", name))


def test_none_cannot_be_combined_with_a_tracker() -> None:
    with pytest.raises(ValidationError, match="none excludes all others"):
        build_training("none", "tensorboard")


def test_every_tracker_of_the_api_has_a_builder() -> None:
    assert sorted(REPORTERS) == sorted((*trackers._CALLBACKS, "tensorboard"))


def test_resumed_attempt_replaces_tensorboard_events_of_repeated_steps(tmp_path: Path) -> None:
    accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")

    def log_attempt(first_step: int, last_step: int, loss: float) -> None:
        tracker = build_tracker("tensorboard", logs=tmp_path, first_step=first_step)
        for step in range(first_step + 1, last_step + 1):
            state = SimpleNamespace(is_world_process_zero=True, global_step=step)
            tracker.on_log(None, state, None, logs={"loss": loss, "tokens_per_second": 10.0, "eval_loss": 2.0})
        tracker.on_train_end(None, None, None)

    log_attempt(0, 5, 1.0)
    log_attempt(3, 6, 0.5)

    events = accumulators.EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert sorted(events.Tags()["scalars"]) == ["eval/loss", "train/loss", "train/tokens_per_second"]
    losses = [(event.step, event.value) for event in events.Scalars("train/loss")]
    assert losses == [(1, 1.0), (2, 1.0), (3, 1.0), (4, 0.5), (5, 0.5), (6, 0.5)]
