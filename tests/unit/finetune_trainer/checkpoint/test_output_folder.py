import errno
import json
import os
import stat
from pathlib import Path

import pytest
from safetensors import SafetensorError

from finetune_trainer import atomic_files as trainers_files
from finetune_trainer.atomic_files import explained, storage_blamed
from finetune_trainer.checkpoint import output_folder as module
from finetune_trainer.checkpoint.output_folder import Output
from finetune_trainer.data_sources.readers import read_rows
from finetune_trainer.errors import CheckpointCorrupt, DatasetError, DiskFull, OutputError, StorageFault
from testing.builders.identity import identity
from testing.fakes.unreadable_file import UNREADABLE


def write_weights(folder: Path) -> None:
    (folder / "weights").write_text("w")


def publish_result(output: Output) -> None:
    output.publish(output.result, write_weights)
    output.mark_success()


def test_the_marker_says_whose_result_it_is_and_a_later_attempt_believes_it(output: Output) -> None:
    publish_result(output)

    later = Output(output.root, identity(attempt=3))
    assert later.is_finished()
    assert json.loads(output.success_file.read_text()) == {"uid": "ours", "fingerprint": "f1", "attempt": 0}


def test_a_result_without_the_marker_does_not_count(output: Output) -> None:
    output.publish(output.result, write_weights)

    assert not output.is_finished()


def test_another_jobs_marker_does_not_count(output: Output) -> None:
    publish_result(output)

    assert not Output(output.root, identity(uid="theirs")).is_finished()


def test_another_jobs_output_is_refused_by_name_with_the_ways_out(output: Output) -> None:
    publish_result(output)

    with pytest.raises(OutputError) as raised:
        Output(output.root, identity(uid="new")).check_owner(overwrite=False)

    assert "default/job-ours (uid ours)" in str(raised.value)
    assert "output.overwrite" in str(raised.value)


def test_files_without_an_owner_are_refused(tmp_path: Path) -> None:
    (tmp_path / "result").mkdir()
    (tmp_path / "result" / "precious").touch()

    with pytest.raises(OutputError, match="unknown owner"):
        Output(tmp_path, identity()).claim(overwrite=False)

    assert (tmp_path / "result" / "precious").exists()


def test_overwrite_replaces_another_jobs_output_and_nothing_else(output: Output) -> None:
    publish_result(output)
    (output.root / "notes.txt").touch()

    Output(output.root, identity(uid="new")).claim(overwrite=True)

    assert not output.result.exists()
    assert (output.root / "notes.txt").exists()


@pytest.mark.parametrize("overwrite", [False, True])
def test_the_same_job_keeps_its_checkpoints(output: Output, overwrite: bool) -> None:
    output.publish(output.checkpoints / "step-00000001", write_weights)

    Output(output.root, identity(attempt=1)).claim(overwrite=overwrite)

    assert (output.checkpoints / "step-00000001" / "weights").exists()


def test_a_changed_job_of_the_same_uid_is_refused(output: Output) -> None:
    with pytest.raises(OutputError, match="another model, dataset, method or training setting"):
        Output(output.root, identity(attempt=1, fingerprint="f2")).check_owner(overwrite=False)


def test_logs_alone_are_no_output(tmp_path: Path) -> None:
    (tmp_path / "logs" / "attempt-0").mkdir(parents=True)

    Output(tmp_path, identity()).check_owner(overwrite=False)


def test_an_older_attempt_is_refused_at_the_door(output: Output) -> None:
    Output(output.root, identity(attempt=2)).claim(overwrite=False)

    with pytest.raises(OutputError, match="superseded by attempt 2"):
        Output(output.root, identity(attempt=1)).claim(overwrite=False)


def test_an_older_attempt_that_still_runs_cannot_publish(output: Output) -> None:
    Output(output.root, identity(attempt=1)).claim(overwrite=False)

    with pytest.raises(OutputError, match="superseded by attempt 1"):
        output.publish(output.checkpoints / "step-00000009", write_weights)
    with pytest.raises(OutputError, match="superseded by attempt 1"):
        output.mark_success()

    assert [path.name for path in output.checkpoints.iterdir() if not path.name.startswith(".tmp-")] == []


def test_an_older_attempt_that_was_overtaken_after_its_check_cannot_publish(
    output: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The newer attempt clears what is staged, so the rename that was already allowed finds nothing."""
    allow = Output.assert_holder
    asked: list[Output] = []

    def overtaken_after_the_first_check(self: Output) -> None:
        allow(self)
        if not asked:
            asked.append(self)
            Output(output.root, identity(attempt=1)).claim(overwrite=False)

    monkeypatch.setattr(Output, "assert_holder", overtaken_after_the_first_check)

    with pytest.raises(OutputError, match="superseded by attempt 1"):
        output.publish(output.checkpoints / "step-00000009", write_weights)

    assert list(output.checkpoints.iterdir()) == []


def test_a_crash_while_writing_leaves_nothing_that_counts_and_the_next_attempt_clears_it(output: Output) -> None:
    def breaks(folder: Path) -> None:
        write_weights(folder)
        raise RuntimeError

    with pytest.raises(RuntimeError):
        output.publish(output.checkpoints / "step-00000009", breaks)
    assert not (output.checkpoints / "step-00000009").exists()

    Output(output.root, identity(attempt=1)).claim(overwrite=False)
    assert list(output.checkpoints.iterdir()) == []


def test_published_files_are_readable_for_others(output: Output) -> None:
    def write_private(folder: Path) -> None:
        (folder / "weights").touch(mode=0o600)

    output.publish(output.result, write_private)

    assert stat.S_IMODE((output.result / "weights").stat().st_mode) & 0o044


def test_a_node_that_does_not_see_the_token_says_so(output: Output, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_SHARED_WITHIN_SECONDS", 0.0)

    with pytest.raises(OutputError, match="needs a ReadWriteMany claim"):
        output.check_shared("the token of another folder")


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES])
def test_a_closed_disk_is_the_users_to_mend(tmp_path: Path, number: int) -> None:
    with pytest.raises(OutputError, match="cannot be written"), explained(tmp_path):
        raise OSError(number, os.strerror(number))


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_told_by_its_number(tmp_path: Path, number: int) -> None:
    with pytest.raises(DiskFull, match=rf"{tmp_path} is full \({os.strerror(number)}\)"), explained(tmp_path):
        raise OSError(number, os.strerror(number))


def test_a_full_disk_is_told_by_the_words_of_safetensors(tmp_path: Path) -> None:
    """It asks for the room of the whole file first, so that the volume is not full afterwards."""
    with pytest.raises(DiskFull), explained(tmp_path):
        raise RuntimeError("Error while serializing: I/O error: No space left on device (os error 28)")


def test_an_error_of_torch_is_explained_by_the_volume_that_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainers_files, "is_full", lambda folder: folder == tmp_path)

    with pytest.raises(DiskFull, match="No space left on device"), explained(tmp_path):
        raise RuntimeError("PytorchStreamWriter failed writing file data/0: file write failed")


def test_errors_of_our_own_are_not_blamed_on_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainers_files, "is_full", lambda _folder: True)

    with pytest.raises(OutputError, match="superseded"), explained(tmp_path):
        raise OutputError("superseded by attempt 2")


def test_other_faults_of_the_disk_stay_what_they_are(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="Input/output error"), explained(tmp_path):
        raise OSError(errno.EIO, os.strerror(errno.EIO))


def test_rows_that_a_file_system_did_not_give_are_not_wrong(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.symlink_to(UNREADABLE)

    with pytest.raises(StorageFault, match=r"rows\.jsonl cannot be read: Input/output error"), storage_blamed():
        list(read_rows(rows))


def test_weights_that_a_file_system_did_not_give_are_told_by_the_words_of_rust() -> None:
    why = SafetensorError("I/O error: Stale file handle (os error 116)")

    with pytest.raises(StorageFault, match="cannot be loaded"), storage_blamed():
        raise CheckpointCorrupt("checkpoint-00000002 cannot be loaded") from why


@pytest.mark.parametrize("error", [DatasetError("row 3 has no messages"), FileNotFoundError(errno.ENOENT, "rows")])
def test_what_is_wrong_with_rows_is_not_blamed_on_storage(error: Exception) -> None:
    with pytest.raises(type(error)), storage_blamed():
        raise error
