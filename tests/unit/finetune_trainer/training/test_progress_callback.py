"""Tests of what the progress callback reports as a degradation."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from finetune_trainer.distributed.heartbeat_writer import HeartbeatWriter
from finetune_trainer.errors import Degraded
from finetune_trainer.training.progress_callback import ProgressCallback


def build_callback(folder: Path, *, on_degraded: str = "warn") -> ProgressCallback:
    inputs = SimpleNamespace(
        heartbeat=HeartbeatWriter(folder, rank=0, local_rank=0),
        plan=SimpleNamespace(spec=SimpleNamespace(training=SimpleNamespace(on_degraded=on_degraded))),
    )
    trainer: Any = SimpleNamespace(inputs=inputs)
    return ProgressCallback(trainer, verbose=True)


@pytest.mark.parametrize(("name", "reason"), [("loss", "ZeroLoss"), ("grad_norm", "ZeroGradient")])
def test_many_steps_with_a_loss_or_gradient_norm_of_zero_are_reported_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, reason: str
) -> None:
    callback = build_callback(tmp_path)
    logs = {"loss": 1.0, "grad_norm": 1.0, name: 0.0}

    for step in range(101, 141):
        callback._check_zeros(logs, step=step)

    (degradation,) = callback._heartbeat.degraded
    assert degradation.reason == reason
    assert degradation.message.startswith(f"{name} has been exactly 0 for 20 steps; likely causes: ")
    assert capsys.readouterr().out.count("warning: degraded") == 1


def test_a_small_value_or_a_few_zeros_are_not_reported(tmp_path: Path) -> None:
    callback = build_callback(tmp_path)

    for step in range(1, 100):
        callback._check_zeros({"loss": 1e-30, "grad_norm": float(step % 19 == 0)}, step=step)

    assert callback._heartbeat.degraded == ()


def test_a_loss_of_zero_ends_a_job_whose_spec_requires_it(tmp_path: Path) -> None:
    callback = build_callback(tmp_path, on_degraded="fail")

    callback._check_zeros({"loss": 0.0, "grad_norm": 1.0}, step=50)
    with pytest.raises(Degraded, match="ZeroLoss: loss has been exactly 0 for 50 steps"):
        callback._check_zeros({"loss": 0.0, "grad_norm": 1.0}, step=100)
