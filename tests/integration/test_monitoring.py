"""Two ranks, one of them slow: what the log, the heartbeats and the report say of it."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from finetune_supervisor.liveness.heartbeat import Heartbeat, read_heartbeats
from testing.models import tiny_text as tiny
from testing.processes.torchrun import launch

pytestmark = pytest.mark.slow

STEPS = 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    files = tiny.build(tmp_path_factory.mktemp("tiny"), rows=64, eval_rows=8)
    spec: dict[str, Any] = {
        "model": {"name": str(files.model)},
        "dataset": {"train": [{"name": str(files.train)}], "eval": [{"name": str(files.eval)}], "maxLength": 256},
        "sft": {},
        "lora": {},
        "training": {"perDeviceTrainBatchSize": 2, "maxSteps": STEPS, "loggingSteps": 2, "reportTo": ["none"]},
        "nprocPerNode": 2,
        "output": {"persistentVolumeClaim": {"claimName": "unused"}},
    }
    folder = tmp_path_factory.mktemp("two") / "cells"
    launch(folder, {"slow": spec}, ranks=2, slow_rank=1)
    return folder


@pytest.fixture(scope="module")
def beats(folder: Path) -> tuple[Heartbeat, ...]:
    found = read_heartbeats(folder / "run" / "ranks")
    assert len(found) == 2
    return found


def test_the_slow_rank_is_named_by_every_rank(beats: tuple[Heartbeat, ...]) -> None:
    for beat in beats:
        assert re.fullmatch(r"rank 1 \+\d+%", beat.progress.slow_rank or ""), beat
    first, second = (beat.own_step_seconds or 0 for beat in beats)
    assert second > 1.1 * first > 0


def test_speed_and_memory_of_all_ranks_are_told(beats: tuple[Heartbeat, ...]) -> None:
    told = beats[0].progress

    assert told.memory is not None
    assert 0.1 < (told.step_seconds or 0) < 60  # the slow rank sleeps for so long
    assert (told.samples_per_second or 0) == pytest.approx(4 / (told.step_seconds or 1), rel=0.01)
    assert (told.tokens_per_second or 0) > (told.samples_per_second or 0)
    assert 0 <= (told.data_wait_share or 0) < 1
    assert told.mfu is None  # of a CPU no peak is known
    peaks = sorted(beat.peak_memory_bytes or 0 for beat in beats)
    assert told.memory.peak_lowest <= told.memory.peak_highest <= peaks[-1]
    assert {told.memory.peak_highest_rank, told.memory.peak_lowest_rank} == {0, 1}
    assert (told.memory.forecast or 0) > 100_000_000


def test_the_report_lies_beside_the_adapter_with_what_was_logged(folder: Path) -> None:
    result = folder / "slow" / "result"
    log = json.loads((result / "trainer_state.json").read_text())["log_history"]

    page = (result / "report.html").read_text()

    logged = [entry for entry in log if "loss" in entry]
    assert [entry["step"] for entry in logged] == [2, 4, 6, 8]
    for entry in logged:
        assert f"training {entry['step']}: {entry['loss']:.4g}<" in page
        assert f"tokens per second {entry['step']}: {entry['tokens_per_second']:.4g}<" in page
    assert len(re.findall(r"<title>rank \d: [\d.]+ GiB</title>", page)) == 2
    assert (result / "adapter_model.safetensors").is_file()
