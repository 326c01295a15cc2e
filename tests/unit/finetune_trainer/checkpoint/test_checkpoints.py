"""Tests saving and pruning checkpoints."""

import errno
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from finetune_trainer.atomic_files import write_json
from finetune_trainer.checkpoint.checkpoints import Checkpoints, WriteFiles
from finetune_trainer.checkpoint.manifest import MANIFEST, parse_checkpoint_step, read_manifest
from finetune_trainer.checkpoint.output_folder import OutputFolder
from finetune_trainer.checksums import seal
from finetune_trainer.errors import CheckpointCorrupt, DiskFull, OutputError, StorageFault
from testing.builders.checkpoint import find_newest, write_checkpoint
from testing.builders.identity import identity
from testing.fakes.killed import Killed, kill_at

pytestmark = pytest.mark.usefixtures("process_group")


def save_checkpoints(output: OutputFolder, *steps: int, keep_last: int = 9) -> Checkpoints:
    checkpoints = Checkpoints(output, keep_last=keep_last)
    for step in steps:
        write_checkpoint(checkpoints, step)
    return checkpoints


def list_checkpoint_names(output: OutputFolder) -> list[str]:
    return sorted(path.name for path in output.checkpoints.iterdir())


def test_the_oldest_checkpoints_are_pruned_after_a_save(output: OutputFolder) -> None:
    save_checkpoints(output, 1, 2, 3, keep_last=2)

    assert list_checkpoint_names(output) == ["step-00000002", "step-00000003"]


def test_the_checkpoint_of_the_retained_step_is_not_pruned(output: OutputFolder) -> None:
    checkpoints = save_checkpoints(output, 1, 2, 3, keep_last=2)
    for step in (4, 5):
        write_checkpoint(checkpoints, step, retained_step=2)

    assert list_checkpoint_names(output) == ["step-00000002", "step-00000004", "step-00000005"]

    write_checkpoint(checkpoints, 6, retained_step=6)
    assert list_checkpoint_names(output) == ["step-00000005", "step-00000006"]


def test_a_failed_save_prunes_no_checkpoints(output: OutputFolder) -> None:
    checkpoints = save_checkpoints(output, 1, keep_last=1)

    def raise_runtime_error(_folder: Path) -> list[Path]:
        raise RuntimeError

    with pytest.raises(RuntimeError):
        checkpoints.stage(2, raise_runtime_error)

    assert find_newest(checkpoints).step == 1


def test_the_files_of_all_ranks_make_a_checkpoint_complete(output: OutputFolder) -> None:
    checkpoints = Checkpoints(output, keep_last=1)

    def write_rank_file(rank: int) -> WriteFiles:
        def write(folder: Path) -> list[Path]:
            (folder / f"rank-{rank}").write_text("data")
            return [folder / f"rank-{rank}"]

        return write

    files_by_rank = [checkpoints.stage(7, write_rank_file(rank)) for rank in (0, 1)]
    assert checkpoints.publish_staged(7, files_by_rank) == "step-00000007"
    assert find_newest(checkpoints).step == 7

    (output.checkpoints / "step-00000007" / "rank-1").unlink()
    with pytest.raises(CheckpointCorrupt, match="rank-1 is missing"):
        find_newest(checkpoints)


def test_free_space_deletes_old_checkpoints(output: OutputFolder, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoints = save_checkpoints(output, 1, 2, 3)

    assert checkpoints.free_space(DiskFull("/output is full"), retained_step=None)

    assert list_checkpoint_names(output) == ["step-00000003"]
    assert capsys.readouterr().out == "/output is full; deleted step-00000002, step-00000001, trying again\n"


def test_a_full_volume_costs_damaged_checkpoints_before_intact_ones(output: OutputFolder) -> None:
    checkpoints = save_checkpoints(output, 1, 2, 3, 4)
    (output.checkpoints / "step-00000004" / "weights").unlink()

    assert checkpoints.free_space(DiskFull("full"), retained_step=1)
    assert list_checkpoint_names(output) == ["step-00000001", "step-00000002", "step-00000003"]

    assert checkpoints.free_space(DiskFull("full"), retained_step=1)
    assert list_checkpoint_names(output) == ["step-00000001", "step-00000003"]

    assert not checkpoints.free_space(DiskFull("full"), retained_step=1)


def test_a_full_volume_costs_the_replaced_output_of_another_job_first(output: OutputFolder) -> None:
    save_checkpoints(output, 1)
    replacing = OutputFolder(output.root, identity(uid="new"))
    replacing.claim(overwrite=True)
    checkpoints = Checkpoints(replacing, keep_last=1)
    assert (output.root / "replaced-output-1" / "checkpoints" / "step-00000001" / "weights").exists()

    assert checkpoints.free_space(DiskFull("full"), retained_step=None)

    assert not (output.root / "replaced-output-1").exists()
    assert not checkpoints.free_space(DiskFull("full"), retained_step=None)


def test_incomplete_checkpoints_are_kept_if_no_complete_checkpoint_exists(output: OutputFolder) -> None:
    checkpoints = save_checkpoints(output, 1, 2)
    for step in (1, 2):
        (output.checkpoints / f"step-{step:08d}" / "weights").unlink()

    assert not checkpoints.free_space(DiskFull("full"), retained_step=None)

    assert list_checkpoint_names(output) == ["step-00000001", "step-00000002"]


def test_a_result_is_published_again_after_old_checkpoints_were_deleted(output: OutputFolder) -> None:
    checkpoints = save_checkpoints(output, 1, 2, 3)

    def write_result(folder: Path) -> None:
        (folder / "weights").touch()
        if len(list_checkpoint_names(output)) > 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    checkpoints.publish(output.result, write_result)

    assert (output.result / "weights").exists()
    assert list_checkpoint_names(output) == ["step-00000003"]


def test_saving_a_step_a_second_time_replaces_a_damaged_checkpoint(output: OutputFolder) -> None:
    checkpoints = save_checkpoints(output, 1, 2)
    (output.checkpoints / "step-00000002" / "weights").unlink()

    write_checkpoint(checkpoints, 2)

    resume_point = find_newest(checkpoints)
    assert resume_point.path is not None
    assert parse_checkpoint_step(resume_point.path) == 2
    assert list_checkpoint_names(output) == ["step-00000001", "step-00000002"]


@pytest.mark.parametrize("keep_last", [1, 2])
def test_a_damaged_newest_checkpoint_is_never_kept_at_the_price_of_an_intact_one(
    output: OutputFolder, keep_last: int
) -> None:
    save_checkpoints(output, 1, 2, 3)
    (output.checkpoints / "step-00000003" / "weights").write_text("x" * 100)
    checkpoints = Checkpoints(output, keep_last=keep_last)
    assert checkpoints.find_intact().step == 2

    write_checkpoint(checkpoints, 2, retained_step=None)
    assert find_newest(checkpoints).step == 2
    write_checkpoint(checkpoints, 4)

    names = [f"step-{step:08d}" for step in ((4,) if keep_last == 1 else (2, 4))]
    assert list_checkpoint_names(output) == names


def test_checkpoints_of_others_neither_count_nor_are_deleted(output: OutputFolder) -> None:
    save_checkpoints(output, 1, 2)
    copies = [output.checkpoints / name for name in ("step-00000002.bak", "step-00000009", "step-1", "step-00000008")]
    for copy in copies:
        shutil.copytree(output.checkpoints / "step-00000002", copy)
    write_json(copies[3] / MANIFEST, seal({**read_manifest(copies[3]).content, "uid": "theirs", "step": 8}))

    write_checkpoint(Checkpoints(output, keep_last=2), 3)

    assert all(copy.exists() for copy in copies)
    assert not (output.checkpoints / "step-00000001").exists()
    assert find_newest(Checkpoints(output, keep_last=2)).step == 3


@pytest.mark.parametrize("keep_last", [1, 2])
@pytest.mark.parametrize("saved_again", [2, 3])
def test_a_save_that_is_killed_anywhere_loses_no_intact_checkpoint(
    tmp_path: Path, keep_last: int, saved_again: int
) -> None:
    """The newest checkpoint is damaged; the step of the one before, or its own, is saved again."""
    point = 0
    while True:
        output = OutputFolder(tmp_path / str(point), identity())
        output.claim(overwrite=False)
        save_checkpoints(output, 2, 3)
        (output.checkpoints / "step-00000003" / "weights").write_text("x" * 100)
        checkpoints = Checkpoints(output, keep_last=keep_last)
        assert checkpoints.find_intact().step == 2
        with pytest.MonkeyPatch.context() as monkeypatch:
            calls = kill_at(monkeypatch, point)
            with suppress(Killed):
                write_checkpoint(checkpoints, saved_again)
        later = OutputFolder(output.root, identity(attempt=1))
        later.claim(overwrite=False)
        assert find_newest(Checkpoints(later, keep_last)).step >= 2, (point, calls)
        if len(calls) < point:
            break
        point += 1
    assert point > 8


@pytest.mark.parametrize("step", [0, 1])
@pytest.mark.parametrize("damage", [Path.unlink, lambda path: path.write_bytes(bytes(186))], ids=["lost", "zeroed"])
def test_the_next_attempt_rebuilds_a_job_file_that_is_lost_during_training(
    output: OutputFolder, damage: Callable[[Path], object], step: int
) -> None:
    save_checkpoints(output, *range(1, step + 1))
    (output.checkpoints / "attention.json").touch()
    damage(output.job_file)
    with pytest.raises(StorageFault, match=f"{output.root} lost job.json"):
        save_checkpoints(output, 3)

    next_attempt = OutputFolder(output.root, identity(attempt=1))
    next_attempt.claim(overwrite=False)

    assert find_newest(Checkpoints(next_attempt, keep_last=1)).step == step
    with pytest.raises(OutputError, match="superseded by attempt 1"):
        save_checkpoints(output, 3)
