"""Tests the program that `finetune estimate` runs."""

import time
from types import SimpleNamespace

import pytest

from finetune_trainer.memory import __main__ as program


def test_a_forecast_without_end_is_an_error_of_the_model(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def compute(*_: object) -> None:
        started_at = time.process_time()
        while time.process_time() - started_at < 10:
            pass

    monkeypatch.setattr(program, "_MAX_BUILD_SECONDS", 0.1)
    monkeypatch.setattr("finetune_trainer.read_spec.read_spec", lambda _file: SimpleNamespace(model=None))
    monkeypatch.setattr("finetune_trainer.model.download.download_description", compute)
    monkeypatch.setattr("sys.argv", ["memory", "spec.json"])

    assert program.main() == program.EXIT_INVALID_INPUT
    assert "building the model of its config.json takes more than" in capsys.readouterr().err
