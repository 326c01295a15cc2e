"""Test the validation of the job spec in the trainer."""

import json
from pathlib import Path

import pytest

from finetune_trainer.errors import InvalidSpec
from finetune_trainer.read_spec import read_spec
from testing.builders.jobs import spec


def test_error_names_every_invalid_field(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(spec(training={"seed": "x", "maxSteps": 0})))

    with pytest.raises(InvalidSpec) as raised:
        read_spec(path)

    assert "spec.training.seed:" in str(raised.value)
    assert "spec.training.maxSteps:" in str(raised.value)


def test_unset_fields_get_the_defaults_with_which_the_job_began(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(spec(training={"saveSteps": 9})))
    (tmp_path / "defaults.json").write_text(json.dumps({"training": {"saveSteps": 50, "loggingSteps": 20}}))

    training = read_spec(path).training

    assert (training.save_steps, training.logging_steps) == (9, 20)


def test_warmup_steps_with_a_constant_schedule_are_rejected(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(spec(training={"lrSchedulerType": "constant", "warmupSteps": 5})))

    with pytest.raises(InvalidSpec, match="use constant_with_warmup"):
        read_spec(path)
