"""Tests that heartbeats report what is not recorded, and that writing them never ends the training."""

import errno
import json
import os
from pathlib import Path

import pytest

from finetune_supervisor.messages import Degradation
from finetune_trainer.distributed import heartbeat_writer
from finetune_trainer.distributed.heartbeat_writer import HeartbeatWriter


@pytest.fixture
def heartbeat(tmp_path: Path) -> HeartbeatWriter:
    return HeartbeatWriter(tmp_path, rank=0, local_rank=0)


def test_incomplete_records_are_one_degradation_beside_others(
    heartbeat: HeartbeatWriter, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    heartbeat.record_degradations((Degradation("Float32", "slow"),))
    for name in ("tensorboard", "report", "tensorboard"):
        with heartbeat.tolerate_errors(name):
            raise FileNotFoundError(2, "No such file or directory", "events.out")

    written = json.loads((tmp_path / "rank-0.json").read_text())["degraded"]
    assert [each["reason"] for each in written] == ["Float32", "NotRecorded"]
    assert "tensorboard: [Errno 2]" in written[1]["message"]
    assert "report: [Errno 2]" in written[1]["message"]
    assert capsys.readouterr().out.count("warning:") == 2


def test_a_file_that_was_written_in_part_is_removed(heartbeat: HeartbeatWriter, tmp_path: Path) -> None:
    with heartbeat.tolerate_errors("model card", tmp_path / "README.md", tmp_path / "other"):
        (tmp_path / "README.md").write_text("half of the ca")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    assert not (tmp_path / "README.md").exists()


def test_a_heartbeat_that_cannot_be_written_is_one_warning(
    heartbeat: HeartbeatWriter, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(heartbeat_writer, "write_heartbeat", fail)

    for phase in ("load", "train"):
        heartbeat.enter_phase(phase)

    assert capsys.readouterr().out.count("warning: the heartbeat is incomplete") == 1
