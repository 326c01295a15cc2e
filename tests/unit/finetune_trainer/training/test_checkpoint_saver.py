"""Tests saving checkpoints in a thread, with one rank; tests/integration/test_parallel.py has several."""

import errno
import faulthandler
import os
import threading
import time
from pathlib import Path

import pytest

from finetune_supervisor.liveness.hang_detector import parse_stack
from finetune_trainer.checkpoint import checkpoints as checkpoints_module
from finetune_trainer.checkpoint.checkpoints import Checkpoints, WriteFiles
from finetune_trainer.checkpoint.output_folder import OutputFolder
from finetune_trainer.errors import DiskFull, OutputError, StorageFault
from finetune_trainer.training.checkpoint_saver import CheckpointPart, CheckpointSaver
from testing.builders.checkpoint import find_newest, write_checkpoint, write_files
from testing.builders.identity import identity

pytestmark = pytest.mark.usefixtures("process_group")


@pytest.fixture
def checkpoints(output: OutputFolder) -> Checkpoints:
    return Checkpoints(output, keep_last=9)


def build_part(step: int, write: WriteFiles = write_files, *, retained_step: int | None = None) -> CheckpointPart:
    return CheckpointPart(step, write, retained_step, staging_seconds=0.25)


def list_names(checkpoints: Checkpoints) -> list[str]:
    return sorted(path.name for path in checkpoints.output.checkpoints.iterdir() if not path.name.startswith(".tmp"))


def test_training_continues_while_files_are_written(checkpoints: Checkpoints) -> None:
    may_write = threading.Event()

    def write_later(folder: Path) -> list[Path]:
        assert may_write.wait(timeout=60)
        return write_files(folder)

    saver = CheckpointSaver(checkpoints)
    saver.start(build_part(4, write_later))
    assert not saver.is_complete
    assert list_names(checkpoints) == []

    may_write.set()
    saved = saver.wait()

    assert saved is not None
    assert saved.name == "step-00000004"
    assert saved.seconds >= 0.25
    assert saved.waited_seconds >= 0.25
    assert find_newest(checkpoints).step == 4
    assert not saver.is_complete


def test_there_is_nothing_to_wait_for_without_a_save(checkpoints: Checkpoints) -> None:
    assert CheckpointSaver(checkpoints).wait() is None


class SmallVolume:
    """Fake volume with space for `capacity` checkpoints, including the checkpoint that is being written."""

    def __init__(self, output: OutputFolder, *, capacity: int) -> None:
        self._output, self._capacity = output, capacity

    def write_checkpoint(self, folder: Path) -> list[Path]:
        paths = write_files(folder)
        if len(list(self._output.checkpoints.iterdir())) > self._capacity:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return paths


def test_old_checkpoints_are_deleted_if_the_volume_is_full(
    checkpoints: Checkpoints, capsys: pytest.CaptureFixture[str]
) -> None:
    for step in (1, 2, 3):
        write_checkpoint(checkpoints, step)
    saver = CheckpointSaver(checkpoints)

    saver.start(build_part(4, SmallVolume(checkpoints.output, capacity=2).write_checkpoint))
    saver.wait()

    assert list_names(checkpoints) == ["step-00000003", "step-00000004"]
    assert "deleted step-00000002, step-00000001, trying again" in capsys.readouterr().out


def test_a_volume_that_stays_full_is_an_error(checkpoints: Checkpoints) -> None:
    for step in (1, 2, 3):
        write_checkpoint(checkpoints, step)
    saver = CheckpointSaver(checkpoints)

    saver.start(build_part(4, SmallVolume(checkpoints.output, capacity=1).write_checkpoint, retained_step=1))
    with pytest.raises(DiskFull):
        saver.wait()

    assert list_names(checkpoints) == ["step-00000001", "step-00000003"]
    saver.start(build_part(5))  # the error does not affect a later save
    assert saver.wait()


def test_a_storage_fault_while_space_is_freed_is_raised_on_every_rank(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (1, 2):
        write_checkpoint(checkpoints, step)

    def fail(_path: Path) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(checkpoints_module, "remove_path", fail)
    saver = CheckpointSaver(checkpoints)

    saver.start(build_part(3, SmallVolume(checkpoints.output, capacity=1).write_checkpoint))
    with pytest.raises(StorageFault, match=str(checkpoints.output.root)):
        saver.wait()

    assert find_newest(checkpoints).step == 2


def test_an_attempt_that_was_superseded_publishes_nothing(checkpoints: Checkpoints) -> None:
    saver = CheckpointSaver(checkpoints)
    OutputFolder(checkpoints.output.root, identity(attempt=1)).claim(overwrite=False)

    saver.start(build_part(4))
    with pytest.raises(OutputError, match="superseded by attempt 1"):
        saver.wait()

    assert list_names(checkpoints) == []


def test_an_unforeseen_error_is_raised_by_wait(checkpoints: Checkpoints) -> None:
    def fail(_folder: Path) -> list[Path]:
        raise ZeroDivisionError

    saver = CheckpointSaver(checkpoints)
    saver.start(build_part(4, fail))

    with pytest.raises(ZeroDivisionError):
        saver.wait()


def test_the_saving_thread_is_inspected_if_the_main_thread_waits_for_it(
    checkpoints: Checkpoints, tmp_path: Path
) -> None:
    """The supervisor finds both threads in a stack dump by the names of their functions."""
    dump = tmp_path / "dump.txt"

    def dump_stacks(folder: Path) -> list[Path]:
        time.sleep(0.5)  # until the main thread waits
        with dump.open("w") as file:
            faulthandler.dump_traceback(file, all_threads=True)
        return write_files(folder)

    saver = CheckpointSaver(checkpoints)
    saver.start(build_part(4, dump_stacks))
    saver.wait()

    assert "in wait" in dump.read_text()
    assert "in dump_stacks" in parse_stack(dump.read_text())[0]
