"""What is kept beside the output, and when the same command continues, tries again or starts another job."""

import errno
import subprocess
import sys
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from finetune_api.v1alpha1.status import AttemptRecord, AttemptState, JobStatus, RestartCounts
from finetune_cli.errors import BadInput
from finetune_cli.local.state_store import Record, continued
from finetune_operator.controller.reconcile import render_status
from testing.builders.job_files import job_file
from testing.builders.jobs import NOW

LATER = NOW + timedelta(hours=1)


def status(state: AttemptState, **fields: Any) -> JobStatus:
    record = AttemptRecord(attempt=1, state=state, start_time=NOW)
    return JobStatus(attempt=1, attempts=(record,), start_time=NOW, **fields)


def began(folder: Path, of: JobStatus | None = None, *, fresh: bool = False, **fields: Any) -> dict[str, Any]:
    """The job's body after one more run, which then has this status."""
    with closing(Record(folder / "bert.local")) as record:
        body = record.begin(job_file(folder, **fields), fresh=fresh)
        if of is not None:
            record.write_status(render_status(of))
    return body


def test_the_same_command_goes_on_with_the_same_job(tmp_path: Path) -> None:
    first = began(tmp_path, status(AttemptState.STOPPED))
    second = began(tmp_path)

    assert second["metadata"] == first["metadata"]
    assert second["status"]["attempts"][0]["state"] == "Stopped"


def test_a_status_that_cannot_be_kept_is_said_in_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)

    with closing(Record(tmp_path / "bert.local")) as record, pytest.raises(BadInput, match=r"status\.json: .*No space"):
        record.write_status(render_status(status(AttemptState.RUNNING)))


@pytest.mark.parametrize(
    "fields",
    [{"resources": {"limits": {"cpu": 2}}}, {"restartPolicy": {"maxRestarts": 0}}],
    ids=["resources", "restartPolicy"],
)
def test_what_may_change_while_suspended_may_change_between_two_runs(fields: dict[str, Any], tmp_path: Path) -> None:
    first = began(tmp_path, status(AttemptState.STOPPED))
    second = began(tmp_path, **fields)

    assert second["metadata"]["uid"] == first["metadata"]["uid"]
    assert second["spec"] == {**first["spec"], **fields}


def test_a_changed_spec_is_another_job(tmp_path: Path) -> None:
    first = began(tmp_path, status(AttemptState.STOPPED))
    (tmp_path / "bert.local/attempt-0").mkdir()
    with closing(Record(tmp_path / "bert.local")) as record:
        assert record.changes(job_file(tmp_path, lora={"r": 4})) == ("spec.lora",)

    second = began(tmp_path, lora={"r": 4})

    assert second["metadata"]["uid"] != first["metadata"]["uid"]
    assert second["status"] == {}
    assert not (tmp_path / "bert.local/attempt-0").exists()


def test_fresh_forgets_the_job_that_was_there(tmp_path: Path) -> None:
    first = began(tmp_path, status(AttemptState.SUCCEEDED, completion_time=NOW))

    assert began(tmp_path, fresh=True)["metadata"]["uid"] != first["metadata"]["uid"]


def test_a_complete_job_stays_complete(tmp_path: Path) -> None:
    done = status(AttemptState.SUCCEEDED, completion_time=NOW)

    assert continued(done, now=LATER) == done


@pytest.mark.parametrize("state", [AttemptState.STARTING, AttemptState.RUNNING, AttemptState.STOPPING])
def test_a_run_that_was_killed_counts_as_suspended(state: AttemptState) -> None:
    after = continued(status(state), now=LATER)

    assert after.attempts[-1].state is AttemptState.STOPPED
    assert after.start_time == NOW


def test_a_failed_job_gets_another_attempt_and_its_limits_anew() -> None:
    counts = RestartCounts(counted=3)
    after = continued(status(AttemptState.FAILED, completion_time=NOW, without_progress=counts), now=LATER)

    assert after.attempts[-1].state is AttemptState.STOPPED
    assert (after.completion_time, after.start_time) == (None, LATER)
    assert after.without_progress == RestartCounts()


def test_a_status_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    began(tmp_path)
    (tmp_path / "bert.local/status.json").write_text("{")

    with pytest.raises(BadInput, match=r"status\.json: cannot be read .* start anew with --fresh"):
        began(tmp_path)
    assert began(tmp_path, fresh=True)["status"] == {}


def test_two_commands_cannot_run_the_same_job(tmp_path: Path) -> None:
    record = Record(tmp_path)

    with pytest.raises(BadInput, match=r"in use by process \d+ \(finetune run\)"):
        Record(tmp_path)
    record.close()
    Record(tmp_path).close()


def test_a_node_that_still_runs_keeps_others_out(tmp_path: Path) -> None:
    record = Record(tmp_path)
    command = [sys.executable, "-c", "input()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=(record.lock,)) as node:
        record.close()
        with pytest.raises(BadInput, match="or by its nodes, which may still be saving"):
            Record(tmp_path)
        node.communicate(b"\n")
    Record(tmp_path).close()
