"""Tests of the state store: when a second run resumes the job, and when it starts a new one."""

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


def status(state: AttemptState, **fields: Any) -> JobStatus:
    record = AttemptRecord(attempt=1, state=state, start_time=NOW)
    return JobStatus(attempt=1, attempts=(record,), start_time=NOW, **fields)


def run_once(
    folder: Path, final_status: JobStatus | None = None, *, fresh: bool = False, **fields: Any
) -> dict[str, Any]:
    """Open the job once more, store the given status, and return the body."""
    with closing(StateStore(folder / "bert.local")) as store:
        body = store.open_job(job_file(folder, **fields), fresh=fresh)
        if final_status is not None:
            store.write_status(render_status(final_status))
    return body


def test_the_same_command_resumes_the_job(tmp_path: Path) -> None:
    first = run_once(tmp_path, status(AttemptState.STOPPED))
    second = run_once(tmp_path)

    assert second["metadata"] == first["metadata"]
    assert second["status"]["attempts"][0]["state"] == "Stopped"


def test_a_status_that_cannot_be_written_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail_with_full_disk(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", fail_with_full_disk)

    with (
        closing(StateStore(tmp_path / "bert.local")) as store,
        pytest.raises(BadInput, match=r"status\.json: .*No space"),
    ):
        store.write_status(render_status(status(AttemptState.RUNNING)))


@pytest.mark.parametrize(
    "fields",
    [{"resources": {"limits": {"cpu": 2}}}, {"restartPolicy": {"maxRestarts": 0}}],
    ids=["resources", "restartPolicy"],
)
def test_fields_that_are_mutable_while_suspended_are_mutable_between_runs(
    fields: dict[str, Any], tmp_path: Path
) -> None:
    first = run_once(tmp_path, status(AttemptState.STOPPED))
    second = run_once(tmp_path, **fields)

    assert second["metadata"]["uid"] == first["metadata"]["uid"]
    assert second["spec"] == {**first["spec"], **fields}


def test_a_changed_spec_starts_a_new_job(tmp_path: Path) -> None:
    first = run_once(tmp_path, status(AttemptState.STOPPED))
    (tmp_path / "bert.local/attempt-0").mkdir()
    with closing(StateStore(tmp_path / "bert.local")) as store:
        assert store.changed_fields(job_file(tmp_path, lora={"r": 4})) == ("spec.lora",)

    second = run_once(tmp_path, lora={"r": 4})

    assert second["metadata"]["uid"] != first["metadata"]["uid"]
    assert second["status"] == {}
    assert not (tmp_path / "bert.local/attempt-0").exists()


def test_fresh_starts_a_new_job(tmp_path: Path) -> None:
    first = run_once(tmp_path, status(AttemptState.SUCCEEDED, completion_time=NOW))

    assert run_once(tmp_path, fresh=True)["metadata"]["uid"] != first["metadata"]["uid"]


def test_an_unreadable_status_file_is_named(tmp_path: Path) -> None:
    run_once(tmp_path)
    (tmp_path / "bert.local/status.json").write_text("{")

    with pytest.raises(BadInput, match=r"status\.json: cannot be read .* start over with --fresh"):
        run_once(tmp_path)
    assert run_once(tmp_path, fresh=True)["status"] == {}


def test_two_commands_cannot_run_the_same_job(tmp_path: Path) -> None:
    store = StateStore(tmp_path)

    with pytest.raises(BadInput, match=r"in use by process \d+ \(finetune run\)"):
        StateStore(tmp_path)
    store.close()
    StateStore(tmp_path).close()


def test_a_running_node_keeps_the_lock(tmp_path: Path) -> None:
    store = StateStore(tmp_path)
    command = [sys.executable, "-c", "input()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=(store.lock,)) as node:
        store.close()
        with pytest.raises(BadInput, match="or by its nodes, which may still be saving"):
            StateStore(tmp_path)
        node.communicate(b"\n")
    StateStore(tmp_path).close()
