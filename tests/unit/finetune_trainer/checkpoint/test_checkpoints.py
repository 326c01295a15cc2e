import errno
import os
import random
from pathlib import Path

import numpy as np
import pytest
import torch

from finetune_trainer.checkpoint.checkpoints import Checkpoints, random_state, restore_random_state, step_of
from finetune_trainer.checkpoint.output_folder import Output
from finetune_trainer.errors import CheckpointCorrupt, DiskFull
from testing.builders.identity import identity


def write(folder: Path) -> None:
    (folder / "weights").write_text("w" * 100)
    (folder / "nested").mkdir()
    (folder / "nested" / "state").write_text("s")


def save(output: Output, *steps: int, keep: int = 9) -> Checkpoints:
    checkpoints = Checkpoints(output, keep=keep)
    for step in steps:
        checkpoints.save(step, 2, write)
    return checkpoints


def names(output: Output) -> list[str]:
    return sorted(path.name for path in output.checkpoints.iterdir())


def test_there_is_nothing_to_resume_at_first(output: Output) -> None:
    assert Checkpoints(output, keep=1).newest().path is None


def test_the_newest_is_resumed_and_its_name_holds_the_step(output: Output) -> None:
    found = save(output, 20, 120).newest()

    assert found.path is not None
    assert found.path.name == "step-00000120"
    assert step_of(found.path) == 120
    assert found.passed_over == ()


def test_the_oldest_go_after_a_good_save(output: Output) -> None:
    save(output, 1, 2, 3, keep=2)

    assert names(output) == ["step-00000002", "step-00000003"]


def test_the_checkpoint_that_is_spared_stays_beside_the_newest(output: Output) -> None:
    checkpoints = save(output, 1, 2, 3, keep=2)
    for step in (4, 5):
        checkpoints.save(step, 2, write, spared=2)

    assert names(output) == ["step-00000002", "step-00000004", "step-00000005"]

    checkpoints.save(6, 2, write, spared=6)
    assert names(output) == ["step-00000005", "step-00000006"]


def test_of_the_checkpoints_that_are_preferred_the_first_whole_one_is_taken(output: Output) -> None:
    checkpoints = save(output, 1, 2, 3)
    (output.checkpoints / "step-00000001" / "weights").unlink()

    found = checkpoints.first_whole((7, 1, 3, 2))

    assert found.step == 3
    assert found.passed_over == ("step-00000007: manifest.json is missing", "step-00000001: weights is missing")


def test_a_failed_save_prunes_nothing(output: Output) -> None:
    checkpoints = save(output, 1, keep=1)

    def breaks(_folder: Path) -> None:
        raise RuntimeError

    with pytest.raises(RuntimeError):
        checkpoints.save(2, 2, breaks)

    found = checkpoints.newest()
    assert found.path is not None
    assert step_of(found.path) == 1


class SmallVolume:
    """Room for so many checkpoints, the one that is being written among them."""

    def __init__(self, output: Output, *, holds: int) -> None:
        self._output, self._holds = output, holds

    def write(self, folder: Path) -> None:
        write(folder)
        if len(list(self._output.checkpoints.iterdir())) > self._holds:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_old_checkpoints_make_room_in_a_full_volume(output: Output, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoints = save(output, 1, 2, 3)

    checkpoints.save(4, 2, SmallVolume(output, holds=2).write)

    assert names(output) == ["step-00000003", "step-00000004"]
    assert "step-00000002, step-00000001 made room, step-00000004 is written again" in capsys.readouterr().out


def test_what_can_be_resumed_from_and_the_best_stay_in_a_full_volume(output: Output) -> None:
    checkpoints = save(output, 1, 2, 3, 4)
    (output.checkpoints / "step-00000004" / "weights").unlink()

    with pytest.raises(DiskFull):
        checkpoints.save(5, 2, SmallVolume(output, holds=3).write, spared=1)

    assert [name for name in names(output) if not name.startswith(".tmp")] == [
        "step-00000001",
        "step-00000003",
        "step-00000004",
    ]


def test_nothing_goes_where_nothing_could_be_resumed_from(output: Output) -> None:
    checkpoints = save(output, 1, 2)
    for step in (1, 2):
        (output.checkpoints / f"step-{step:08d}" / "weights").unlink()

    with pytest.raises(DiskFull):
        checkpoints.save(3, 2, SmallVolume(output, holds=1).write)

    assert {"step-00000001", "step-00000002"} <= set(names(output))


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda folder: (folder / "weights").unlink(), "weights is missing"),
        (lambda folder: (folder / "nested" / "state").write_text(""), "nested/state has 0 bytes of 1"),
        (lambda folder: (folder / "manifest.json").unlink(), "manifest.json is missing"),
        (lambda folder: (folder / "manifest.json").write_text("{"), "manifest.json is damaged"),
    ],
    ids=["file gone", "file cut", "no manifest", "broken manifest"],
)
def test_a_partial_checkpoint_is_passed_over_for_the_one_before(output: Output, damage, words: str) -> None:  # type: ignore[no-untyped-def]
    checkpoints = save(output, 1, 2)
    damage(output.checkpoints / "step-00000002")

    found = checkpoints.newest()

    assert found.path is not None
    assert step_of(found.path) == 1
    assert found.passed_over == (f"step-00000002: {words}",)


def test_no_whole_checkpoint_among_some_is_an_error_that_names_them(output: Output) -> None:
    checkpoints = save(output, 1)
    (output.checkpoints / "step-00000001" / "weights").unlink()

    with pytest.raises(CheckpointCorrupt, match="step-00000001: weights is missing"):
        checkpoints.newest()


def test_a_checkpoint_of_another_job_is_not_resumed(output: Output) -> None:
    save(output, 1)

    with pytest.raises(CheckpointCorrupt, match="it belongs to another job"):
        Checkpoints(Output(output.root, identity(uid="new")), keep=1).newest()


def test_a_damaged_checkpoint_is_replaced_when_its_step_comes_again(output: Output) -> None:
    checkpoints = save(output, 1, 2)
    (output.checkpoints / "step-00000002" / "weights").unlink()

    checkpoints.save(2, 2, write)

    found = checkpoints.newest()
    assert found.path is not None
    assert step_of(found.path) == 2
    assert names(output) == ["step-00000001", "step-00000002"]


def test_generators_go_on_where_they_were(tmp_path: Path) -> None:
    torch.save(random_state(), tmp_path / "state.pt")
    before = random.random(), np.random.rand(), torch.rand(1).item()

    restore_random_state(torch.load(tmp_path / "state.pt", weights_only=True))

    assert (random.random(), np.random.rand(), torch.rand(1).item()) == before
