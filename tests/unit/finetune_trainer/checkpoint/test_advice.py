"""Tests that carry out what messages and pages advise, and that no checkpoint is lost by it."""

from collections.abc import Callable
from pathlib import Path

import pytest

from finetune_trainer.checkpoint.checkpoints import Checkpoints
from finetune_trainer.checkpoint.output_folder import OutputFolder
from finetune_trainer.errors import CheckpointCorrupt, OutputError
from testing.builders.checkpoint import find_newest, write_checkpoint
from testing.builders.identity import identity

pytestmark = pytest.mark.usefixtures("process_group")


@pytest.fixture
def checkpoints(output: OutputFolder) -> Checkpoints:
    """Return two checkpoints of a job."""
    checkpoints = Checkpoints(output, keep_last=9)
    for step in (1, 2):
        write_checkpoint(checkpoints, step)
    return checkpoints


def move_aside(*paths: Path, folder: Path) -> None:
    folder.mkdir()
    for path in paths:
        path.rename(folder / path.name)


def list_steps(checkpoints: Checkpoints) -> list[Path]:
    return sorted(checkpoints.output.checkpoints.glob("step-*"))


def damage_all(checkpoints: Checkpoints) -> dict[Path, bytes]:
    """Damage the weights of all checkpoints, and return the original content."""
    intact = {step / "weights": (step / "weights").read_bytes() for step in list_steps(checkpoints)}
    for file in intact:
        file.write_bytes(bytes(100))
    return intact


def test_a_restored_checkpoint_is_used(checkpoints: Checkpoints) -> None:
    intact = damage_all(checkpoints)
    with pytest.raises(CheckpointCorrupt, match="nothing was deleted: restore one, or move them"):
        find_newest(checkpoints)

    file = min(intact)
    file.write_bytes(intact[file])

    assert find_newest(checkpoints).step == 1


def test_moved_checkpoints_let_the_job_start_from_the_beginning_and_stay(
    checkpoints: Checkpoints, tmp_path: Path
) -> None:
    damage_all(checkpoints)

    move_aside(*list_steps(checkpoints), folder=tmp_path / "aside")
    later = OutputFolder(checkpoints.output.root, identity(attempt=1))
    later.claim(overwrite=False)

    assert find_newest(Checkpoints(later, keep_last=1)).path is None
    write_checkpoint(Checkpoints(later, keep_last=1), 1)
    assert len(list((tmp_path / "aside").glob("step-*/weights"))) == 2


def test_without_a_checkpoint_that_cannot_be_loaded_the_one_before_is_used(
    checkpoints: Checkpoints, tmp_path: Path
) -> None:
    """The message of checkpoints whose tensors cannot be read, and that of best weights that cannot be published."""
    move_aside(list_steps(checkpoints)[-1], folder=tmp_path / "aside")

    assert find_newest(checkpoints).step == 1
    assert checkpoints.find_intact((2, 1)).step == 1


def use_another_folder(other: OutputFolder) -> None:
    OutputFolder(other.root.with_name("another"), other.identity).claim(overwrite=False)


def overwrite_and_move_back(other: OutputFolder) -> None:
    """Move back what a job moved aside that did not reach its first checkpoint."""
    other.claim(overwrite=True)
    aside = other.root / "replaced-output-1"
    other.checkpoints.rmdir()
    for path in aside.iterdir():
        path.replace(other.root / path.name)


@pytest.mark.parametrize("follow", [use_another_folder, overwrite_and_move_back])
def test_the_advice_for_the_output_of_another_job_keeps_it(
    checkpoints: Checkpoints, follow: Callable[[OutputFolder], None]
) -> None:
    other = OutputFolder(checkpoints.output.root, identity(uid="other", name="another-job"))
    with pytest.raises(OutputError, match=r"choose another output.subPath, .* or set output.overwrite, which moves"):
        other.claim(overwrite=False)

    follow(other)

    assert find_newest(checkpoints).step == 2
    OutputFolder(checkpoints.output.root, identity(attempt=1)).claim(overwrite=False)
