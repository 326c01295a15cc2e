"""Tests that a job resumes from the newest checkpoint whose content is unchanged."""

import errno
import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from finetune_trainer.checkpoint.checkpoints import Checkpoints
from finetune_trainer.checkpoint.output_folder import OutputFolder
from finetune_trainer.errors import CheckpointCorrupt, StorageFault
from testing.builders.checkpoint import find_newest, write_checkpoint
from testing.builders.identity import identity

pytestmark = pytest.mark.usefixtures("process_group")

CHANGES = 200


def save_checkpoints(output: OutputFolder, *steps: int) -> Checkpoints:
    checkpoints = Checkpoints(output, keep_last=9)
    for step in steps:
        write_checkpoint(checkpoints, step)
    return checkpoints


def rewrite_manifest(folder: Path, change: Callable[[dict[str, object]], object]) -> None:
    manifest = json.loads((folder / "manifest.json").read_text())
    change(manifest)
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=2))


def remove_checksums(manifest: dict[str, object]) -> None:
    """Change a manifest to that of a release without checksums."""
    del manifest["crc32"], manifest["checksum"]


def replace_file(path: Path, create: Callable[[Path], object]) -> None:
    path.unlink()
    create(path)


def test_a_new_job_has_no_checkpoint_to_resume_from(output: OutputFolder) -> None:
    assert find_newest(Checkpoints(output, keep_last=1)).path is None


def test_training_resumes_from_the_newest_checkpoint(output: OutputFolder, capsys: pytest.CaptureFixture[str]) -> None:
    resume_point = find_newest(save_checkpoints(output, 20, 120))

    assert resume_point.path == output.checkpoints / "step-00000120"
    assert (resume_point.step, resume_point.skipped, resume_point.is_verified) == (120, (), True)
    assert "step-00000120: read 0.00 GB in " in capsys.readouterr().out


def test_checkpoints_are_sorted_by_their_steps(output: OutputFolder) -> None:
    assert find_newest(save_checkpoints(output, 99_999_999, 100_000_000)).step == 100_000_000


def test_a_changed_byte_anywhere_is_detected(output: OutputFolder) -> None:
    checkpoints = save_checkpoints(output, 1, 2)
    folder, generator = output.checkpoints / "step-00000002", random.Random(46)
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    assert len(files) == 3
    places = [(file, position) for file in files for position in range(file.stat().st_size)]

    for file, position in generator.sample(places, k=CHANGES):
        intact = file.read_bytes()
        damaged = bytearray(intact)
        damaged[position] ^= generator.randrange(1, 256)
        file.write_bytes(damaged)

        resume_point = find_newest(checkpoints)

        assert resume_point.step == 1, (file, position)
        assert resume_point.skipped[0].startswith(f"step-00000002: {file.relative_to(folder)} ")
        file.write_bytes(intact)
    assert find_newest(checkpoints).step == 2


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (lambda folder: (folder / "weights").unlink(), "weights is missing"),
        (lambda folder: (folder / "nested" / "state").write_text(""), "nested/state has 0 bytes of 1"),
        (
            lambda folder: (folder / "weights").write_bytes(bytes(100)),
            "weights has other content than was written (CRC",
        ),
        (lambda folder: (folder / "manifest.json").unlink(), "manifest.json is missing"),
        (lambda folder: (folder / "manifest.json").write_text("{"), "manifest.json is damaged"),
        (lambda folder: (folder / "manifest.json").write_text("[" * 10_000), "manifest.json is damaged"),
        (lambda folder: (folder / "manifest.json").write_bytes(b"\xff"), "manifest.json is damaged"),
        (
            lambda folder: rewrite_manifest(folder, lambda manifest: manifest.pop("checksum")),
            "manifest.json is damaged",
        ),
        (lambda folder: folder.rename(folder.with_name("moved")) and folder.touch(), "manifest.json is missing"),
        (lambda folder: replace_file(folder / "manifest.json", os.mkfifo), "manifest.json is damaged"),
        (lambda folder: replace_file(folder / "manifest.json", Path.mkdir), "manifest.json is damaged"),
        (lambda folder: replace_file(folder / "weights", os.mkfifo), "weights "),
    ],
    ids=[
        *("missing", "truncated", "zeroed", "no manifest", "no JSON", "nested", "no UTF-8", "not sealed", "a file"),
        *("a pipe", "a folder", "a pipe instead of weights"),
    ],
)
def test_an_incomplete_or_damaged_checkpoint_is_skipped(
    output: OutputFolder, damage: Callable[[Path], object], problem: str
) -> None:
    checkpoints = save_checkpoints(output, 1, 2)
    damage(output.checkpoints / "step-00000002")

    resume_point = find_newest(checkpoints)

    assert resume_point.step == 1
    assert resume_point.skipped[0].startswith(f"step-00000002: {problem}")


def test_a_checkpoint_of_a_release_without_checksums_is_used_but_not_verified(output: OutputFolder) -> None:
    checkpoints = save_checkpoints(output, 1)
    rewrite_manifest(output.checkpoints / "step-00000001", remove_checksums)
    (output.checkpoints / "step-00000001" / "weights").write_bytes(bytes(100))

    resume_point = find_newest(checkpoints)

    assert (resume_point.step, resume_point.is_verified) == (1, False)


def test_without_an_intact_checkpoint_the_error_lists_the_problems_and_nothing_is_deleted(output: OutputFolder) -> None:
    checkpoints = save_checkpoints(output, 1, 2)
    (output.checkpoints / "step-00000001" / "weights").unlink()
    (output.checkpoints / "step-00000002" / "weights").write_bytes(bytes(100))

    with pytest.raises(CheckpointCorrupt) as raised:
        find_newest(checkpoints)

    assert "step-00000001: weights is missing" in str(raised.value)
    assert "step-00000002: weights has other content" in str(raised.value)
    assert "delete" not in str(raised.value).replace("nothing was deleted", "")
    assert (output.checkpoints / "step-00000002" / "weights").exists()


def test_training_does_not_resume_from_a_checkpoint_of_another_job(output: OutputFolder) -> None:
    save_checkpoints(output, 1)

    with pytest.raises(CheckpointCorrupt, match="it belongs to another job"):
        find_newest(Checkpoints(OutputFolder(output.root, identity(uid="new")), keep_last=1))


def test_copies_and_links_of_checkpoints_are_ignored_and_named(
    output: OutputFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoints = save_checkpoints(output, 17)
    for name in ("step-00000017.bak", "step-00000099", "copy"):
        shutil.copytree(output.checkpoints / "step-00000017", output.checkpoints / name)
    (output.checkpoints / "step-00000098").symlink_to("step-00000017")

    resume_point = find_newest(checkpoints)

    assert resume_point.step == 17
    assert resume_point.skipped == ("step-00000099: it is a copy of the checkpoint of step 17",)
    ignored = capsys.readouterr().out
    assert all(f"{output.checkpoints / name} is ignored" in ignored for name in ("step-00000017.bak", "copy"))
    assert f"{output.checkpoints}/step-00000098 is ignored" in ignored


def test_the_first_intact_checkpoint_of_several_steps_is_found(output: OutputFolder) -> None:
    checkpoints = save_checkpoints(output, 1, 2, 3)
    (output.checkpoints / "step-00000001" / "weights").unlink()

    resume_point = checkpoints.find_intact((7, 1, 3, 2))

    assert resume_point.step == 3
    assert resume_point.skipped == ("step-00000007: manifest.json is missing", "step-00000001: weights is missing")


def test_a_checkpoint_that_cannot_be_read_is_a_storage_fault(
    output: OutputFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = save_checkpoints(output, 1)

    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT))

    monkeypatch.setattr("finetune_trainer.checksums.record_file", fail)

    with pytest.raises(StorageFault, match=r"step-00000001: .*Connection timed out"):
        find_newest(checkpoints)
