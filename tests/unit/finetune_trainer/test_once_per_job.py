"""Tests of values that rank 0 fetches once per job."""

import dataclasses
import threading
from pathlib import Path

import pytest

from finetune_trainer.errors import HubUnavailable, ModelNotFound, OutputError
from finetune_trainer.once_per_job import fetch_once_per_job
from testing.fakes.downloads import build_download_settings


def test_the_value_is_fetched_once_per_job_and_key(tmp_path: Path) -> None:
    values = iter(["first", "other key", "other job"])

    def fetch(job: str, key: str) -> str:
        downloads = build_download_settings(tmp_path / "hub", job=job)
        return str(fetch_once_per_job(downloads, key, lambda _: next(values), goal="fetch"))

    assert [fetch("a", "x"), fetch("a", "x"), fetch("a", "y"), fetch("b", "x"), fetch("a", "x")] == [
        "first",
        "first",
        "other key",
        "other job",
        "first",
    ]


def test_other_ranks_wait_for_the_value_of_the_writer(tmp_path: Path) -> None:
    writer = build_download_settings(tmp_path)
    waiting_rank = dataclasses.replace(writer, is_writer=False, timeout_seconds=60)
    thread = threading.Timer(0.2, lambda: fetch_once_per_job(writer, "x", lambda _: ["a.jsonl"], goal="fetch"))
    thread.start()

    assert fetch_once_per_job(waiting_rank, "x", lambda _: pytest.fail("fetched twice"), goal="fetch") == ["a.jsonl"]
    thread.join()


def test_waiting_has_a_time_limit(tmp_path: Path) -> None:
    with pytest.raises(HubUnavailable, match=r"rank 0 did not fetch x within 0\.2 seconds; raise .*ddpTimeout"):
        fetch_once_per_job(
            build_download_settings(tmp_path, writes=False), "x", lambda _: 1, goal="rank 0 did not fetch x"
        )


def test_a_failed_fetch_is_repeated_by_the_next_attempt(tmp_path: Path) -> None:
    downloads = build_download_settings(tmp_path)

    def fail(_: object) -> None:
        raise ModelNotFound("gated")

    with pytest.raises(ModelNotFound):
        fetch_once_per_job(downloads, "x", fail, goal="fetch")

    assert fetch_once_per_job(downloads, "x", lambda _: "fetched", goal="fetch") == "fetched"


def test_a_folder_that_cannot_be_written_is_an_output_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "mkdir", refuse)

    with pytest.raises(OutputError, match="cannot be written"):
        fetch_once_per_job(build_download_settings(tmp_path / "hub"), "x", lambda _: 1, goal="fetch")
