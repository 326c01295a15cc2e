"""Tests the ownership of output folders, atomic publishing, and the translation of disk errors."""

import errno
import json
import os
import shutil
import stat
from contextlib import suppress
from pathlib import Path

import pytest
from safetensors import SafetensorError

from finetune_trainer import atomic_files
from finetune_trainer.atomic_files import translate_disk_errors
from finetune_trainer.checkpoint import output_folder
from finetune_trainer.checkpoint.checkpoints import Checkpoints
from finetune_trainer.checkpoint.output_folder import OutputFolder
from finetune_trainer.checkpoint.row_identity import RowIdentity
from finetune_trainer.data_sources.readers import read_rows
from finetune_trainer.errors import CheckpointCorrupt, DatasetError, DiskFull, OutputError, StorageFault
from finetune_trainer.storage_faults import raise_storage_faults
from testing.builders.checkpoint import find_newest, write_checkpoint, write_files
from testing.builders.identity import identity
from testing.fakes.killed import Killed, kill_at
from testing.fakes.unreadable_file import UNREADABLE_FILE

pytestmark = pytest.mark.usefixtures("process_group")
ROWS = {"train rows": "digest"}


def write_weights(folder: Path) -> None:
    (folder / "weights").write_text("w")


def publish_result(output: OutputFolder) -> None:
    output.publish(output.result, write_weights)
    output.mark_success()


def test_the_success_marker_is_valid_for_later_attempts_of_the_job(output: OutputFolder) -> None:
    output.publish(output.result, write_weights)
    assert not output.is_finished()

    output.mark_success()

    assert json.loads(output.success_file.read_text()) == {"uid": "ours", "fingerprint": "f1", "attempt": 0}
    assert OutputFolder(output.root, identity(attempt=3)).is_finished()
    assert not OutputFolder(output.root, identity(uid="theirs")).is_finished()


def test_the_error_for_output_of_another_job_names_the_job_and_suggests_a_fix(output: OutputFolder) -> None:
    publish_result(output)

    with pytest.raises(OutputError) as raised:
        OutputFolder(output.root, identity(uid="new")).check_owner(overwrite=False)

    assert "default/job-ours (uid ours)" in str(raised.value)
    assert "output.overwrite" in str(raised.value)


def test_a_recreated_job_claims_the_folder_if_its_predecessor_has_no_output(output: OutputFolder) -> None:
    recreated = OutputFolder(output.root, identity(uid="new", name="job-ours"))

    recreated.claim(overwrite=False)

    with pytest.raises(OutputError, match="taken over"):
        output.check_holder()


def recreate(output: OutputFolder, *, fingerprint: str = "f1") -> OutputFolder:
    """Return the folder of a job that was created again under the same name."""
    return OutputFolder(output.root, identity(uid="new", name="job-ours", fingerprint=fingerprint))


def test_a_recreated_job_continues_the_training_of_its_predecessor(
    output: OutputFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    write_checkpoint(Checkpoints(output, keep_last=9, rows=ROWS), 1)

    recreate(output).claim(overwrite=False, rows=ROWS)

    assert "continues the training of job default/job-ours (uid ours), which was deleted" in capsys.readouterr().out
    assert find_newest(Checkpoints(recreate(output), keep_last=1)).step == 1
    recreate(output).job_file.unlink()  # the adopted checkpoint names its new owner
    recreate(output).claim(overwrite=True, rows=ROWS)
    assert find_newest(Checkpoints(recreate(output), keep_last=1)).step == 1
    with pytest.raises(OutputError, match="taken over"):
        output.check_holder()


def test_a_recreated_job_does_not_replace_the_result_of_its_predecessor(output: OutputFolder) -> None:
    publish_result(output)

    with pytest.raises(OutputError, match=r"the result of job default/job-ours \(uid ours\), which was deleted"):
        recreate(output).claim(overwrite=False)

    assert (output.result / "weights").exists()


@pytest.mark.parametrize(
    ("fingerprint", "rows", "problem"),
    [
        ("f2", ROWS, "which was deleted and had other settings; choose another output.subPath"),
        ("f1", {"train rows": "others"}, "holds checkpoints that were trained on other rows"),
    ],
)
def test_a_recreated_job_with_another_training_keeps_the_checkpoints(
    output: OutputFolder, fingerprint: str, rows: RowIdentity, problem: str
) -> None:
    write_checkpoint(Checkpoints(output, keep_last=9, rows=ROWS), 1)

    with pytest.raises(OutputError, match=problem):
        recreate(output, fingerprint=fingerprint).claim(overwrite=False, rows=rows)

    assert find_newest(Checkpoints(output, keep_last=1)).step == 1


@pytest.mark.parametrize("damage", ["removed", "zeroed", "not UTF-8", "nested", "a pipe"])
@pytest.mark.parametrize("overwrite", [False, True])
def test_the_owner_is_found_in_the_checkpoints_if_the_job_file_is_damaged(
    output: OutputFolder, damage: str, overwrite: bool
) -> None:
    write_checkpoint(Checkpoints(output, keep_last=9), 1)
    contents = {"zeroed": bytes(186), "not UTF-8": b"\xff", "nested": b"[" * 10_000}
    output.job_file.unlink()
    if damage in contents:
        output.job_file.write_bytes(contents[damage])
    elif damage == "a pipe":
        os.mkfifo(output.job_file)

    next_attempt = OutputFolder(output.root, identity(attempt=1))
    next_attempt.claim(overwrite=overwrite)

    assert json.loads(output.job_file.read_text())["uid"] == "ours"
    assert find_newest(Checkpoints(next_attempt, keep_last=1)).step == 1


def test_checkpoints_of_a_job_stay_if_the_job_file_names_another_job(output: OutputFolder) -> None:
    write_checkpoint(Checkpoints(output, keep_last=9), 1)
    output.job_file.write_text(json.dumps({**json.loads(output.job_file.read_text()), "uid": "theirs"}))

    output.claim(overwrite=True)

    assert find_newest(Checkpoints(output, keep_last=1)).step == 1


def test_an_empty_folder_of_another_job_is_rejected(output: OutputFolder) -> None:
    with pytest.raises(OutputError, match=r"default/job-ours \(uid ours\)"):
        OutputFolder(output.root, identity(uid="theirs")).check_owner(overwrite=False)


def test_existing_files_without_an_owner_are_rejected(tmp_path: Path) -> None:
    (tmp_path / "result").mkdir()
    (tmp_path / "result" / "precious").touch()

    with pytest.raises(OutputError, match="unknown owner"):
        OutputFolder(tmp_path, identity()).claim(overwrite=False)

    assert (tmp_path / "result" / "precious").exists()


def test_overwrite_moves_the_output_of_another_job_aside_until_the_first_checkpoint(output: OutputFolder) -> None:
    write_checkpoint(Checkpoints(output, keep_last=9), 1)
    publish_result(output)
    (output.root / "notes.txt").touch()

    replacing = OutputFolder(output.root, identity(uid="new"))
    replacing.claim(overwrite=True)

    aside = output.root / "replaced-output-1"
    assert not output.result.exists()
    assert (aside / "result" / "weights").exists()
    assert find_newest(Checkpoints(OutputFolder(aside, output.identity), keep_last=1)).step == 1
    assert OutputFolder(aside, output.identity).is_finished()
    assert json.loads((aside / "job.json").read_text())["uid"] == "ours"

    write_checkpoint(Checkpoints(replacing, keep_last=1), 1)
    assert sorted(path.name for path in output.root.iterdir()) == ["checkpoints", "job.json", "notes.txt"]


def test_the_replaced_output_is_deleted_if_the_volume_has_no_space_for_the_claim(
    output: OutputFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish_result(output)

    monkeypatch.setattr(output_folder, "is_volume_full", lambda _folder: True)
    OutputFolder(output.root, identity(uid="new")).claim(overwrite=True)

    assert not list(output.root.glob("replaced-output-*"))


def test_a_second_overwrite_keeps_what_the_first_one_replaced(output: OutputFolder) -> None:
    for uid in ("first", "second"):
        publish_result(output)
        output = OutputFolder(output.root, identity(uid=uid))
        output.claim(overwrite=True)

    assert (output.root / "replaced-output-1" / "result" / "weights").exists()
    assert (output.root / "replaced-output-2" / "result" / "weights").exists()


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_claim_that_is_killed_anywhere_loses_no_checkpoint(tmp_path: Path, overwrite: bool) -> None:
    point = 0
    while True:
        output = OutputFolder(tmp_path / str(point), identity())
        output.claim(overwrite=False)
        write_checkpoint(Checkpoints(output, keep_last=9), 1)
        write_checkpoint(Checkpoints(output, keep_last=9), 2)
        with pytest.MonkeyPatch.context() as monkeypatch:
            calls = kill_at(monkeypatch, point)
            with suppress(Killed):
                recreate(output).claim(overwrite=overwrite)
        recreate(output).claim(overwrite=overwrite)
        if overwrite:
            assert len(list(output.root.glob("replaced-output-*/checkpoints/step-*/weights"))) == 2, (point, calls)
        else:
            assert find_newest(Checkpoints(recreate(output), keep_last=1)).step == 2, (point, calls)
        if len(calls) < point:
            break
        point += 1
    assert point > 3


@pytest.mark.parametrize("name", ["step-00000009", "result"])
def test_a_folder_that_was_being_replaced_is_restored(output: OutputFolder, name: str) -> None:
    replaced = output.checkpoints / f".tmp-attempt-0-replaced-{name}"
    replaced.mkdir()

    OutputFolder(output.root, identity(attempt=1)).claim(overwrite=False)

    assert (output.result if name == "result" else output.checkpoints / name).is_dir()
    assert not replaced.exists()


@pytest.mark.parametrize("overwrite", [False, True])
def test_the_next_attempt_of_a_job_keeps_its_checkpoints(output: OutputFolder, overwrite: bool) -> None:
    output.publish(output.checkpoints / "step-00000001", write_weights)

    OutputFolder(output.root, identity(attempt=1)).claim(overwrite=overwrite)

    assert (output.checkpoints / "step-00000001" / "weights").exists()


def test_an_attempt_with_another_fingerprint_is_rejected(output: OutputFolder) -> None:
    with pytest.raises(OutputError, match="another model, dataset, method or training setting"):
        OutputFolder(output.root, identity(attempt=1, fingerprint="f2")).check_owner(overwrite=False)


def test_an_attempt_continues_after_another_version_of_the_fingerprint(output: OutputFolder) -> None:
    output.publish(output.checkpoints / "step-00000001", write_weights)

    next_attempt = OutputFolder(output.root, identity(attempt=1, fingerprint="v2:f2"))
    next_attempt.claim(overwrite=False)

    assert (output.checkpoints / "step-00000001" / "weights").exists()
    assert json.loads(output.job_file.read_text())["fingerprint"] == "v2:f2"


@pytest.mark.parametrize("fingerprint", [None, 3, "v2:other"])
def test_another_fingerprint_of_the_same_version_is_rejected(tmp_path: Path, fingerprint: object) -> None:
    output = OutputFolder(tmp_path, identity(fingerprint="v2:f2"))
    output.claim(overwrite=False)
    output.job_file.write_text(json.dumps({**json.loads(output.job_file.read_text()), "fingerprint": fingerprint}))

    with pytest.raises(OutputError, match="another model"):
        output.check_owner(overwrite=False)


def test_a_folder_that_contains_only_logs_has_no_owner(tmp_path: Path) -> None:
    (tmp_path / "logs" / "attempt-0").mkdir(parents=True)

    OutputFolder(tmp_path, identity()).check_owner(overwrite=False)


def test_an_older_attempt_cannot_claim_the_folder(output: OutputFolder) -> None:
    OutputFolder(output.root, identity(attempt=2)).claim(overwrite=False)

    with pytest.raises(OutputError, match="superseded by attempt 2"):
        OutputFolder(output.root, identity(attempt=1)).claim(overwrite=False)


def test_an_older_attempt_cannot_publish(output: OutputFolder) -> None:
    OutputFolder(output.root, identity(attempt=1)).claim(overwrite=False)

    with pytest.raises(OutputError, match="superseded by attempt 1"):
        output.publish(output.checkpoints / "step-00000009", write_weights)
    with pytest.raises(OutputError, match="superseded by attempt 1"):
        output.mark_success()

    assert [path.name for path in output.checkpoints.iterdir() if not path.name.startswith(".tmp-")] == []


def test_an_older_attempt_cannot_publish_after_a_concurrent_claim(
    output: OutputFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rename fails, because the newer attempt deletes the staged folder after the ownership check."""
    check_holder = OutputFolder.check_holder
    checks: list[OutputFolder] = []

    def check_holder_and_claim_with_newer_attempt(self: OutputFolder) -> None:
        check_holder(self)
        checks.append(self)
        if len(checks) == 2:  # the check right before the folder is renamed
            OutputFolder(output.root, identity(attempt=1)).claim(overwrite=False)

    monkeypatch.setattr(OutputFolder, "check_holder", check_holder_and_claim_with_newer_attempt)

    with pytest.raises(OutputError, match="superseded by attempt 1"):
        output.publish(output.checkpoints / "step-00000009", write_weights)

    assert list(output.checkpoints.iterdir()) == []


def test_staged_files_of_a_crashed_attempt_are_deleted(output: OutputFolder) -> None:
    def write_and_crash(folder: Path) -> None:
        write_weights(folder)
        raise RuntimeError

    with pytest.raises(RuntimeError):
        output.publish(output.checkpoints / "step-00000009", write_and_crash)
    assert not (output.checkpoints / "step-00000009").exists()

    OutputFolder(output.root, identity(attempt=1)).claim(overwrite=False)
    assert list(output.checkpoints.iterdir()) == []


def test_a_planted_link_in_place_of_staged_files_is_deleted(output: OutputFolder, tmp_path: Path) -> None:
    (tmp_path / "private").mkdir()
    later = OutputFolder(output.root, identity(attempt=1))
    later.get_staged_folder(output.checkpoints / "step-00000009").symlink_to(tmp_path / "private")

    later.claim(overwrite=False)

    assert list(output.checkpoints.iterdir()) == []
    assert (tmp_path / "private").is_dir()


def test_published_files_are_readable_by_group_and_others(output: OutputFolder) -> None:
    def write_private_file(folder: Path) -> None:
        (folder / "weights").touch(mode=0o600)

    output.publish(output.result, write_private_file)

    assert stat.S_IMODE((output.result / "weights").stat().st_mode) & 0o044


def test_storage_that_nodes_do_not_share_is_rejected(output: OutputFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output_folder, "_SHARED_STORAGE_TIMEOUT_SECONDS", 0.0)

    with pytest.raises(OutputError, match="needs a ReadWriteMany claim"):
        output.check_shared_storage("the token of another folder")


def raise_errno(number: int, *file: str) -> None:
    """Raise an error of the system; that of an open file does not contain its name."""
    raise OSError(number, os.strerror(number), *file)


@pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES], ids=["EROFS", "EACCES"])
def test_a_write_to_a_read_only_volume_raises_an_output_error(tmp_path: Path, code: int) -> None:
    with pytest.raises(OutputError, match="cannot be written"), translate_disk_errors(tmp_path):
        raise_errno(code)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT], ids=["ENOSPC", "EDQUOT"])
def test_a_full_volume_is_detected_by_errno(tmp_path: Path, code: int) -> None:
    with pytest.raises(DiskFull, match=rf"{tmp_path} is full \({os.strerror(code)}\)"), translate_disk_errors(tmp_path):
        raise_errno(code)


def test_other_disk_errors_are_not_translated(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="File name too long"), translate_disk_errors(tmp_path):
        raise_errno(errno.ENAMETOOLONG)


@pytest.mark.parametrize("file", [(), ("/output/checkpoints/x",)], ids=["without a file", "with a file"])
@pytest.mark.parametrize("number", [errno.EIO, errno.ETIMEDOUT, errno.EHOSTDOWN])
def test_a_storage_fault_names_the_folder(tmp_path: Path, number: int, file: tuple[str, ...]) -> None:
    with pytest.raises(StorageFault, match=(*file, str(tmp_path))[0]), translate_disk_errors(tmp_path):
        raise_errno(number, *file)


def test_a_full_volume_is_detected_by_the_safetensors_message(tmp_path: Path) -> None:
    """safetensors raises this error before it writes the file, so the volume is not full afterwards."""
    with pytest.raises(DiskFull), translate_disk_errors(tmp_path):
        raise RuntimeError("Error while serializing: I/O error: No space left on device (os error 28)")


def test_a_torch_write_error_on_a_full_volume_raises_disk_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(atomic_files, "is_volume_full", lambda folder: folder == tmp_path)

    with pytest.raises(DiskFull, match="No space left on device"), translate_disk_errors(tmp_path):
        raise RuntimeError("PytorchStreamWriter failed writing file data/0: file write failed")


def test_trainer_errors_are_not_translated_on_a_full_volume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(atomic_files, "is_volume_full", lambda _folder: True)

    with pytest.raises(OutputError, match="superseded"), translate_disk_errors(tmp_path):
        raise OutputError("superseded by attempt 2")


def test_a_claim_that_is_no_longer_mounted_is_a_storage_fault(output: OutputFolder) -> None:
    """Its mount point is an empty folder, which another owner would not have left behind."""
    checkpoints = Checkpoints(output, keep_last=2)
    shutil.rmtree(output.root)
    output.root.mkdir()

    with pytest.raises(StorageFault, match=f"{output.root}.* lost job.json"):
        checkpoints.stage(1, write_files)
    with pytest.raises(StorageFault, match="no longer mounted"):
        output.publish(output.result, write_weights)

    assert list(output.root.iterdir()) == []


def test_a_claim_that_is_lost_while_it_is_written_is_a_storage_fault(output: OutputFolder) -> None:
    """Libraries then report that the file or its folder does not exist, in their own words."""

    def lose_claim(_folder: Path) -> list[Path]:
        shutil.rmtree(output.root)
        raise SafetensorError("I/O error: No such file or directory (os error 2)")

    with pytest.raises(StorageFault, match=f"{output.root} lost job.json"):
        Checkpoints(output, keep_last=2).stage(1, lose_claim)


def test_staged_files_without_an_owner_do_not_occupy_a_folder(output: OutputFolder) -> None:
    (output.get_staged_folder(output.checkpoints / "step-00000001") / "state").mkdir(parents=True)
    output.job_file.unlink()

    OutputFolder(output.root, identity(attempt=1)).claim(overwrite=False)

    assert list(output.checkpoints.iterdir()) == []


def test_a_read_error_of_a_dataset_is_a_storage_fault(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.symlink_to(UNREADABLE_FILE)

    with pytest.raises(StorageFault, match=r"rows\.jsonl cannot be read: Input/output error"), raise_storage_faults():
        list(read_rows(rows))


def test_a_read_error_of_weights_is_detected_by_the_safetensors_message() -> None:
    cause = SafetensorError("I/O error: Stale file handle (os error 116)")

    with pytest.raises(StorageFault, match="cannot be loaded"), raise_storage_faults():
        raise CheckpointCorrupt("checkpoint-00000002 cannot be loaded") from cause


@pytest.mark.parametrize("error", [DatasetError("row 3 has no messages"), FileNotFoundError(errno.ENOENT, "rows")])
def test_errors_in_dataset_rows_are_not_storage_faults(error: Exception) -> None:
    with pytest.raises(type(error)), raise_storage_faults():
        raise error
