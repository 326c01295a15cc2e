"""Failures of ranks, read from error files and exit codes, and choice of the first one."""

import json
import os
from pathlib import Path

import pytest

from finetune_supervisor.contract import RunFolder
from finetune_supervisor.failures.rank_failures import find_first_failure, read_failures

LOST = "[../gloo/transport/tcp/pair.cc:537] Connection closed by peer [10.0.0.7]:4321"


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return RunFolder(tmp_path)


def write_error_file(run: RunFolder, local_rank: int, error: str, *, at: float) -> None:
    """Write an error file like torchrun's @record, with this modification time."""
    path = run.torchrun / "none_x1" / "attempt_0" / str(local_rank) / "error.json"
    path.parent.mkdir(parents=True)
    extra = {"py_callstack": f"Traceback\n{error}", "timestamp": str(int(at))}
    path.write_text(json.dumps({"message": {"message": error, "extraInfo": extra}}))
    os.utime(path, (at, at))


def write_exits(run: RunFolder, **codes: int) -> None:
    exits = {name.removeprefix("rank"): {"code": code, "time": 100} for name, code in codes.items()}
    run.exits.write_text(json.dumps(exits))


def test_without_files_there_is_no_failure(run: RunFolder) -> None:
    assert find_first_failure(read_failures(run)) is None


def test_an_error_file_yields_type_message_and_stack(run: RunFolder) -> None:
    write_error_file(run, 1, "DatasetError: rows.jsonl line 3: expected: a list", at=100.5)
    write_exits(run, rank1=1)

    failure = find_first_failure(read_failures(run))

    assert failure is not None
    assert (failure.local_rank, failure.error_type) == (1, "DatasetError")
    assert failure.message == "rows.jsonl line 3: expected: a list"
    assert failure.stack.startswith("Traceback")
    assert (failure.time, failure.exit_code, failure.signal, failure.victim) == (100.5, 1, None, False)


def test_the_earliest_exception_is_the_first_failure(run: RunFolder) -> None:
    write_error_file(run, 0, "ValueError: late", at=100.9)
    write_error_file(run, 1, "ValueError: early", at=100.2)

    failure = find_first_failure(read_failures(run))

    assert failure is not None
    assert failure.message == "early"


@pytest.mark.parametrize(
    "error",
    [
        f"RuntimeError: {LOST}",
        "DistBackendError: NCCL error in: ProcessGroupNCCL.cpp",
        "RuntimeError: Timed out waiting 30000ms for recv operation to complete",
        "DistNetworkError: The client socket has timed out",
        "TimeoutError: timed out",
        "ConnectionAbortedError: [Errno 103]",
    ],
)
def test_a_victim_is_not_the_first_failure_even_if_it_is_the_earliest(run: RunFolder, error: str) -> None:
    write_error_file(run, 0, error, at=100.1)
    write_error_file(run, 1, "OutOfMemoryError: CUDA out of memory", at=100.8)

    failure = find_first_failure(read_failures(run))

    assert failure is not None
    assert failure.error_type == "OutOfMemoryError"


def test_if_all_are_victims_the_first_failure_is_one(run: RunFolder) -> None:
    write_error_file(run, 0, f"RuntimeError: {LOST}", at=100.1)

    failure = find_first_failure(read_failures(run))

    assert failure is not None
    assert failure.victim


def test_a_killed_rank_has_only_a_signal(run: RunFolder) -> None:
    write_error_file(run, 0, f"RuntimeError: {LOST}", at=99.5)
    write_exits(run, rank0=1, rank1=-9)

    failure = find_first_failure(read_failures(run))

    assert failure is not None
    assert (failure.local_rank, failure.error_type, failure.signal) == (1, "RankKilled", 9)
    assert "SIGKILL" in failure.message


def test_a_rank_terminated_by_torchrun_is_a_victim(run: RunFolder) -> None:
    write_exits(run, rank0=-15, rank1=42)

    failure = find_first_failure(read_failures(run))

    assert failure is not None
    assert (failure.local_rank, failure.error_type, failure.exit_code) == (1, "RankExited", 42)


def test_the_error_of_the_launcher_is_used_if_no_rank_has_one(run: RunFolder) -> None:
    record = {"message": "DistNetworkError: the port is in use", "extraInfo": {"py_callstack": "Traceback"}}
    run.launcher_error.write_text(json.dumps({"message": record}))

    failure = find_first_failure(read_failures(run))

    assert failure is not None
    assert (failure.local_rank, failure.error_type) == (None, "DistNetworkError")


@pytest.mark.parametrize("text", ["", "no json", "[]", '{"message": "plain"}'])
def test_the_text_of_an_error_file_in_another_format_becomes_the_message(run: RunFolder, text: str) -> None:
    write_error_file(run, 0, "x", at=1)
    next(run.torchrun.rglob("error.json")).write_text(text)

    failure = find_first_failure(read_failures(run))

    assert failure is not None
    assert (failure.error_type, failure.message) == ("UnknownError", text)


def test_an_invalid_file_of_exit_codes_is_ignored(run: RunFolder) -> None:
    run.exits.write_text("[1]")

    assert find_first_failure(read_failures(run)) is None
