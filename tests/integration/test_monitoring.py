"""Tests of the log, heartbeats and report of a job with one slow rank of two."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from finetune_supervisor.liveness.heartbeat import Heartbeat, read_heartbeats
from testing.models import tiny_text
from testing.processes.launches import run_cells

pytestmark = pytest.mark.slow

STEPS = 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    files = tiny_text.build(tmp_path_factory.mktemp("tiny"), rows=64, eval_rows=8)
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
    run_cells(folder, {"slow": spec}, ranks=2, slow_rank=1, forecasts=True)
    return folder


@pytest.fixture(scope="module")
def heartbeats(folder: Path) -> tuple[Heartbeat, ...]:
    heartbeats = read_heartbeats(folder / "run" / "ranks")
    assert len(heartbeats) == 2
    return heartbeats


def test_every_rank_reports_the_slow_rank(heartbeats: tuple[Heartbeat, ...]) -> None:
    for heartbeat in heartbeats:
        assert re.fullmatch(r"rank 1 \+\d+%", heartbeat.progress.slow_rank or ""), heartbeat
    first, second = (heartbeat.own_step_seconds or 0 for heartbeat in heartbeats)
    assert second > 1.1 * first > 0


def test_heartbeats_contain_throughput_and_memory_of_all_ranks(heartbeats: tuple[Heartbeat, ...]) -> None:
    progress = heartbeats[0].progress

    assert progress.memory is not None
    assert 0.1 < (progress.step_seconds or 0) < 60  # includes the sleep of the slow rank
    assert (progress.samples_per_second or 0) == pytest.approx(4 / (progress.step_seconds or 1), rel=0.01)
    assert (progress.tokens_per_second or 0) > (progress.samples_per_second or 0)
    assert 0 <= (progress.data_wait_share or 0) < 1
    assert progress.mfu is None  # the peak FLOPS of CPUs are unknown
    peaks = sorted(heartbeat.peak_memory_bytes or 0 for heartbeat in heartbeats)
    assert progress.memory.peak_lowest <= progress.memory.peak_highest <= peaks[-1]
    assert {progress.memory.peak_highest_rank, progress.memory.peak_lowest_rank} == {0, 1}
    assert (progress.memory.forecast or 0) > 100_000_000


def test_report_is_next_to_the_adapter_and_contains_the_logged_metrics(folder: Path) -> None:
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
