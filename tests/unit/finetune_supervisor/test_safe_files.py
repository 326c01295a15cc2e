"""Tests that nothing below the mount point of the output is written through a link."""

import os
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from finetune_supervisor.failures.termination_message import write_termination
from finetune_supervisor.launch.child_process import ProcessOutput
from finetune_supervisor.launch.program import enable_flight_recorder
from finetune_supervisor.messages import TerminationMessage
from finetune_supervisor.safe_files import open_below, open_folder
from finetune_trainer.atomic_files import check_no_links, fsync_tree, translate_disk_errors, write_json
from finetune_trainer.errors import OutputError
from finetune_trainer.metrics.trackers import build_tracker
from finetune_trainer.report.attempt_log import AttemptEntry, AttemptLog
from testing.builders.nodes import node
from testing.written_paths import TRIED


@pytest.fixture
def mount(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the mount point of an output, beside a private folder that contains a file."""
    (tmp_path / "private").mkdir()
    (tmp_path / "private" / "key").write_text("key")
    monkeypatch.setenv("FINETUNE_CACHE_DIR", str(tmp_path / "output" / "cache"))
    (tmp_path / "output").mkdir()
    return tmp_path / "output"


def write_log(output: Path) -> None:
    log = ProcessOutput(output / "logs" / "attempt-0" / "node-0.log")
    log.write(b"text")
    log.finish(lambda: None, seconds=10.0)


def write_final_message(output: Path) -> None:
    write_termination(output / "logs" / "attempt-0" / "node-0.json", TerminationMessage())


def write_attempt(output: Path) -> None:
    AttemptLog(output / "logs", AttemptEntry("uid", 0, 1, 0.0)).write()


def write_job(output: Path) -> None:
    write_json(output / "job.json", {})


def write_tensorboard(output: Path) -> None:
    build_tracker("tensorboard", logs=output / "logs", first_step=0)._SummaryWriter().close()


def write_success(output: Path) -> None:
    check_no_links((output / "checkpoints", output / "result"))
    write_json(output / "result" / "SUCCESS", {}, staging_file=output / "checkpoints" / ".tmp-attempt-0-SUCCESS")


def write_in_cache(output: Path) -> None:
    cache = output.parent / "cache"
    check_no_links((cache / "huggingface" / "hub", cache / "tokens"))
    (cache / "huggingface" / "hub").mkdir(parents=True, exist_ok=True)
    (cache / "huggingface" / "hub" / "CACHEDIR.TAG").write_text("of huggingface_hub")
    write_json(cache / "hub" / "KEY.json", {})
    write_json(cache / "tokens" / ".KEY-uid-1-0.json", {})


def write_everything(output: Path) -> None:
    """Write as a job does; a function that reports a link writes nothing."""
    for write in (
        write_job,
        write_log,
        write_final_message,
        write_attempt,
        write_tensorboard,
        write_success,
        write_in_cache,
    ):
        with suppress(OSError, OutputError):
            write(output)


@pytest.mark.parametrize("path", TRIED)
@pytest.mark.parametrize("to_folder", [False, True])
def test_nothing_is_written_through_a_planted_link(mount: Path, path: str, *, to_folder: bool) -> None:
    private = mount.parent / "private"
    (mount / path).parent.mkdir(parents=True, exist_ok=True)
    (mount / path).symlink_to(private if to_folder else private / "key")

    write_everything(mount / "job")

    assert os.listdir(private) == ["key"]
    assert (private / "key").read_text() == "key"


def test_a_link_to_a_missing_file_creates_nothing(mount: Path) -> None:
    (mount / "log").symlink_to(mount.parent / "private" / "new")

    with pytest.raises(OSError, match="log"):
        open_below(mount / "log", os.O_WRONLY | os.O_CREAT)

    assert not (mount.parent / "private" / "new").exists()


def test_a_pipe_is_refused_without_waiting(mount: Path) -> None:
    os.mkfifo(mount / "log")

    with pytest.raises(OSError, match="log"):
        open_below(mount / "log", os.O_WRONLY | os.O_CREAT)


def test_the_mount_point_itself_may_be_a_link(mount: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (mount.parent / "link").symlink_to(mount)
    monkeypatch.setenv("FINETUNE_CACHE_DIR", str(mount.parent / "link" / "cache"))

    with open_folder(mount.parent / "link" / "job" / "logs"):
        assert (mount / "job" / "logs").is_dir()


def test_a_folder_that_is_a_link_is_named_before_training(mount: Path) -> None:
    (mount / "job").mkdir()
    (mount / "job" / "logs").symlink_to(mount.parent / "private")

    check_no_links((mount / "job", mount / "missing" / "folder"))
    with pytest.raises(OutputError, match=r"job/logs is a link or a file.*move it away"):
        check_no_links((mount / "job" / "logs" / "attempt-0",))


def test_planted_links_for_the_flight_recorder_are_removed(tmp_path: Path) -> None:
    this_node = replace(node(tmp_path), output=tmp_path / "output", attempt=0)
    folder = tmp_path / "output" / "logs" / "attempt-0"
    folder.mkdir(parents=True)
    (folder / "collectives-rank-0").symlink_to(tmp_path / "key")
    (folder / "collectives-rank-1").write_text("dump of an earlier container")

    enable_flight_recorder({}, this_node)

    assert os.listdir(folder) == ["collectives-rank-1"]


def test_the_mode_of_a_file_outside_of_the_result_is_not_changed(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("key")
    (tmp_path / "key").chmod(0o600)
    (tmp_path / "result").mkdir()
    (tmp_path / "result" / "config.json").symlink_to(tmp_path / "key")

    with pytest.raises(OutputError, match=r"result/config\.json is a link"), translate_disk_errors(tmp_path):
        fsync_tree(tmp_path / "result")

    assert (tmp_path / "key").stat().st_mode & 0o777 == 0o600
