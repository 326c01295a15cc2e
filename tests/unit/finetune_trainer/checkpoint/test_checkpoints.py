"""Tests saving, pruning and finding checkpoints."""

import errno
import os
from pathlib import Path

import pytest

from finetune_trainer.checkpoint.checkpoints import Checkpoints, WriteFiles, parse_checkpoint_step
from finetune_trainer.checkpoint.output_folder import OutputFolder
from finetune_trainer.errors import CheckpointCorrupt, DiskFull
from testing.builders.checkpoint import write_checkpoint
from testing.builders.identity import identity


def save_checkpoints(output: OutputFolder, *steps: int, keep_last: int = 9) -> Checkpoints:
    checkpoints = Checkpoints(output, keep_last=keep_last)
    for step in steps:
        write_checkpoint(checkpoints, step)
    return checkpoints


def list_checkpoint_names(output: OutputFolder) -> list[str]:
    return sorted(path.name for path in output.checkpoints.iterdir())


def test_a_new_job_has_no_checkpoint_to_resume_from(output: OutputFolder) -> None:
    assert Checkpoints(output, keep_last=1).find_newest_complete().path is None


def test_training_resumes_from_the_newest_checkpoint(output: OutputFolder) -> None:
    resume_point = save_checkpoints(output, 20, 120).find_newest_complete()

    assert resume_point.path is not None
    assert resume_point.path.name == "step-00000120"
    assert parse_checkpoint_step(resume_point.path) == 120
    assert resume_point.skipped == ()


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


def test_find_first_complete_skips_missing_and_incomplete_checkpoints(output: OutputFolder) -> None:
    checkpoints = save_checkpoints(output, 1, 2, 3)
    (output.checkpoints / "step-00000001" / "weights").unlink()

    resume_point = checkpoints.find_first_complete((7, 1, 3, 2))

    assert resume_point.step == 3
    assert resume_point.skipped == ("step-00000007: manifest.json is missing", "step-00000001: weights is missing")


def test_a_failed_save_prunes_no_checkpoints(output: OutputFolder) -> None:
    checkpoints = save_checkpoints(output, 1, keep_last=1)

    def raise_runtime_error(_folder: Path) -> list[Path]:
        raise RuntimeError

    with pytest.raises(RuntimeError):
        checkpoints.stage(2, raise_runtime_error)

    assert checkpoints.find_newest_complete().step == 1


def test_the_files_of_all_ranks_make_a_checkpoint_complete(output: OutputFolder) -> None:
    checkpoints = Checkpoints(output, keep_last=1)

    def write_rank_file(rank: int) -> WriteFiles:
        def write(folder: Path) -> list[Path]:
            (folder / f"rank-{rank}").write_text("data")
            return [folder / f"rank-{rank}"]

        return write

    files_by_rank = [checkpoints.stage(7, write_rank_file(rank)) for rank in (0, 1)]
    assert checkpoints.publish_staged(7, files_by_rank) == "step-00000007"
    assert checkpoints.find_newest_complete().step == 7

    (output.checkpoints / "step-00000007" / "rank-1").unlink()
    with pytest.raises(CheckpointCorrupt, match="rank-1 is missing"):
        checkpoints.find_newest_complete()


def test_free_space_deletes_old_checkpoints(output: OutputFolder, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoints = save_checkpoints(output, 1, 2, 3)

    assert checkpoints.free_space(DiskFull("/output is full"), retained_step=None)

    assert list_checkpoint_names(output) == ["step-00000003"]
    assert capsys.readouterr().out == "/output is full; deleted step-00000002, step-00000001, trying again\n"


def test_the_newest_complete_and_the_retained_checkpoint_are_kept_on_a_full_volume(output: OutputFolder) -> None:
    checkpoints = save_checkpoints(output, 1, 2, 3, 4)
    (output.checkpoints / "step-00000004" / "weights").unlink()

    assert checkpoints.free_space(DiskFull("full"), retained_step=1)

    assert list_checkpoint_names(output) == ["step-00000001", "step-00000003", "step-00000004"]


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


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (lambda folder: (folder / "weights").unlink(), "weights is missing"),
        (lambda folder: (folder / "nested" / "state").write_text(""), "nested/state has 0 bytes of 1"),
        (lambda folder: (folder / "manifest.json").unlink(), "manifest.json is missing"),
        (lambda folder: (folder / "manifest.json").write_text("{"), "manifest.json is damaged"),
    ],
    ids=["missing file", "truncated file", "missing manifest", "damaged manifest"],
)
def test_an_incomplete_checkpoint_is_skipped(output: OutputFolder, damage, problem: str) -> None:  # type: ignore[no-untyped-def]
    checkpoints = save_checkpoints(output, 1, 2)
    damage(output.checkpoints / "step-00000002")

    resume_point = checkpoints.find_newest_complete()

    assert resume_point.path is not None
    assert parse_checkpoint_step(resume_point.path) == 1
    assert resume_point.skipped == (f"step-00000002: {problem}",)


def test_the_error_if_no_checkpoint_is_complete_lists_the_problems(output: OutputFolder) -> None:
    checkpoints = save_checkpoints(output, 1)
    (output.checkpoints / "step-00000001" / "weights").unlink()

    with pytest.raises(CheckpointCorrupt, match="step-00000001: weights is missing"):
        checkpoints.find_newest_complete()


def test_training_does_not_resume_from_a_checkpoint_of_another_job(output: OutputFolder) -> None:
    save_checkpoints(output, 1)

    with pytest.raises(CheckpointCorrupt, match="it belongs to another job"):
        Checkpoints(OutputFolder(output.root, identity(uid="new")), keep_last=1).find_newest_complete()


def test_saving_a_step_a_second_time_replaces_a_damaged_checkpoint(output: OutputFolder) -> None:
    checkpoints = save_checkpoints(output, 1, 2)
    (output.checkpoints / "step-00000002" / "weights").unlink()

    write_checkpoint(checkpoints, 2)

    resume_point = checkpoints.find_newest_complete()
    assert resume_point.path is not None
    assert parse_checkpoint_step(resume_point.path) == 2
    assert list_checkpoint_names(output) == ["step-00000001", "step-00000002"]
