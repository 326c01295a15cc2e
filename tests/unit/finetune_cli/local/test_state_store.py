"""Tests of the state store, which returns the stored job or creates a new one."""

import errno
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from finetune_api.v1alpha1.status import AttemptRecord, AttemptState, JobStatus
from finetune_cli.errors import BadInput
from finetune_cli.local.state_store import StateStore
from finetune_operator.controller.reconcile import render_status
from testing.builders.job_files import job_file
from testing.builders.jobs import NOW


def build_status(state: AttemptState, **fields: Any) -> JobStatus:
    record = AttemptRecord(attempt=1, state=state, start_time=NOW)
    return JobStatus(attempt=1, attempts=(record,), start_time=NOW, **fields)


def open_job_and_write_status(
    folder: Path, final_status: JobStatus | None = None, *, start_over: bool = False, **fields: Any
) -> dict[str, Any]:
    """Open the job, store the final status, and return the job body."""
    with closing(StateStore(folder / "bert.local")) as store:
        body = store.open_job(job_file(folder, **fields), start_over=start_over)
        if final_status is not None:
            store.write_status(render_status(final_status))
    return body


def test_same_job_file_resumes_the_job(tmp_path: Path) -> None:
    first_body = open_job_and_write_status(tmp_path, build_status(AttemptState.STOPPED))
    second_body = open_job_and_write_status(tmp_path)

    assert second_body["metadata"] == first_body["metadata"]
    assert second_body["status"]["attempts"][0]["state"] == "Stopped"


def test_status_write_error_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail_with_full_disk(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", fail_with_full_disk)

    with (
        closing(StateStore(tmp_path / "bert.local")) as store,
        pytest.raises(BadInput, match=r"status\.json: .*No space"),
    ):
        store.write_status(render_status(build_status(AttemptState.RUNNING)))


@pytest.mark.parametrize(
    "fields",
    [{"resources": {"limits": {"cpu": 2}}}, {"restartPolicy": {"maxRestarts": 0}}],
    ids=["resources", "restartPolicy"],
)
def test_mutable_fields_can_be_changed_between_runs(fields: dict[str, Any], tmp_path: Path) -> None:
    first_body = open_job_and_write_status(tmp_path, build_status(AttemptState.STOPPED))
    second_body = open_job_and_write_status(tmp_path, **fields)

    assert second_body["metadata"]["uid"] == first_body["metadata"]["uid"]
    assert second_body["spec"] == {**first_body["spec"], **fields}


def test_changed_spec_starts_a_new_job(tmp_path: Path) -> None:
    first_body = open_job_and_write_status(tmp_path, build_status(AttemptState.STOPPED))
    (tmp_path / "bert.local/attempt-0").mkdir()
    with closing(StateStore(tmp_path / "bert.local")) as store:
        assert store.find_changed_fields(job_file(tmp_path, lora={"r": 4})) == ("spec.lora",)

    second_body = open_job_and_write_status(tmp_path, lora={"r": 4})

    assert second_body["metadata"]["uid"] != first_body["metadata"]["uid"]
    assert second_body["status"] == {}
    assert not (tmp_path / "bert.local/attempt-0").exists()


def test_start_over_creates_a_new_job(tmp_path: Path) -> None:
    first_body = open_job_and_write_status(tmp_path, build_status(AttemptState.SUCCEEDED, completion_time=NOW))

    assert open_job_and_write_status(tmp_path, start_over=True)["metadata"]["uid"] != first_body["metadata"]["uid"]


def test_unreadable_status_file_is_reported_with_its_path(tmp_path: Path) -> None:
    open_job_and_write_status(tmp_path)
    (tmp_path / "bert.local/status.json").write_text("{")

    with pytest.raises(BadInput, match=r"status\.json: cannot be read .* move it to another folder"):
        open_job_and_write_status(tmp_path)
    assert open_job_and_write_status(tmp_path, start_over=True)["status"] == {}


def test_two_commands_cannot_run_the_same_job(tmp_path: Path) -> None:
    store = StateStore(tmp_path)

    with pytest.raises(BadInput, match=r"in use by process \d+ \(finetune run\)"):
        StateStore(tmp_path)
    store.close()
    StateStore(tmp_path).close()


def test_running_node_keeps_the_lock(tmp_path: Path) -> None:
    store = StateStore(tmp_path)
    command = [sys.executable, "-c", "input()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=(store.lock,)) as node:
        store.close()
        with pytest.raises(BadInput, match="or by its nodes, which may still be saving"):
            StateStore(tmp_path)
        node.communicate(b"\n")
    StateStore(tmp_path).close()
