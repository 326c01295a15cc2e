"""Tests of reading rank failures and finding the first one."""

import json
import os
from pathlib import Path

import pytest

from finetune_supervisor.contract import RunFolder
from finetune_supervisor.failures.rank_failures import RankFailure, find_first_failure, read_failures

CONNECTION_LOST = "[../gloo/transport/tcp/pair.cc:537] Connection closed by peer [10.0.0.7]:4321"


@pytest.fixture
def run_folder(tmp_path: Path) -> RunFolder:
    return RunFolder(tmp_path)


def write_error_file(run_folder: RunFolder, local_rank: int, error: str, *, modified_at: float) -> None:
    """Write an error file in the format of torchrun's @record."""
    path = run_folder.error_files / "none_x1" / "attempt_0" / str(local_rank) / "error.json"
    path.parent.mkdir(parents=True)
    extra_info = {"py_callstack": f"Traceback\n{error}", "timestamp": str(int(modified_at))}
    path.write_text(json.dumps({"message": {"message": error, "extraInfo": extra_info}}))
    os.utime(path, (modified_at, modified_at))


def write_exit_codes(run_folder: RunFolder, **codes: int) -> None:
    exits = {name.removeprefix("rank"): {"code": code, "time": 100} for name, code in codes.items()}
    run_folder.rank_exits.write_text(json.dumps(exits))


def find_failure(run_folder: RunFolder) -> RankFailure:
    failure = find_first_failure(read_failures(run_folder))
    assert failure is not None
    return failure


def test_run_folder_without_files_has_no_failure(run_folder: RunFolder) -> None:
    assert find_first_failure(read_failures(run_folder)) is None


def test_error_file_contains_type_message_and_stack(run_folder: RunFolder) -> None:
    write_error_file(run_folder, 1, "DatasetError: rows.jsonl line 3: expected: a list", modified_at=100.5)
    write_exit_codes(run_folder, rank1=1)

    failure = find_failure(run_folder)

    assert (failure.local_rank, failure.error_type) == (1, "DatasetError")
    assert failure.message == "rows.jsonl line 3: expected: a list"
    assert failure.stack.startswith("Traceback")
    assert (failure.time, failure.exit_code, failure.signal, failure.victim) == (100.5, 1, None, False)


def test_earliest_exception_is_the_first_failure(run_folder: RunFolder) -> None:
    write_error_file(run_folder, 0, "ValueError: late", modified_at=100.9)
    write_error_file(run_folder, 1, "ValueError: early", modified_at=100.2)

    assert find_failure(run_folder).message == "early"


@pytest.mark.parametrize(
    "error",
    [
        f"RuntimeError: {CONNECTION_LOST}",
        "DistBackendError: NCCL error in: ProcessGroupNCCL.cpp",
        "RuntimeError: Timed out waiting 30000ms for recv operation to complete",
        "DistNetworkError: The client socket has timed out",
        "TimeoutError: timed out",
        "ConnectionAbortedError: [Errno 103]",
    ],
)
def test_earliest_failure_is_ignored_if_it_is_a_victim(run_folder: RunFolder, error: str) -> None:
    write_error_file(run_folder, 0, error, modified_at=100.1)
    write_error_file(run_folder, 1, "OutOfMemoryError: CUDA out of memory", modified_at=100.8)

    assert find_failure(run_folder).error_type == "OutOfMemoryError"


def test_victim_is_the_first_failure_if_all_failures_are_victims(run_folder: RunFolder) -> None:
    write_error_file(run_folder, 0, f"RuntimeError: {CONNECTION_LOST}", modified_at=100.1)

    assert find_failure(run_folder).victim


def test_killed_rank_without_error_file_is_the_first_failure(run_folder: RunFolder) -> None:
    write_error_file(run_folder, 0, f"RuntimeError: {CONNECTION_LOST}", modified_at=99.5)
    write_exit_codes(run_folder, rank0=1, rank1=-9)

    failure = find_failure(run_folder)

    assert (failure.local_rank, failure.error_type, failure.signal) == (1, "RankKilled", 9)
    assert "SIGKILL" in failure.message


def test_rank_terminated_by_torchrun_is_a_victim(run_folder: RunFolder) -> None:
    write_exit_codes(run_folder, rank0=-15, rank1=42)

    failure = find_failure(run_folder)

    assert (failure.local_rank, failure.error_type, failure.exit_code) == (1, "RankExited", 42)


def test_launcher_error_is_used_if_no_rank_failed(run_folder: RunFolder) -> None:
    record = {"message": "DistNetworkError: the port is in use", "extraInfo": {"py_callstack": "Traceback"}}
    run_folder.launcher_error.write_text(json.dumps({"message": record}))

    failure = find_failure(run_folder)

    assert (failure.local_rank, failure.error_type) == (None, "DistNetworkError")


@pytest.mark.parametrize("text", ["", "no json", "[]", '{"message": "plain"}'])
def test_error_file_in_unknown_format_becomes_the_message(run_folder: RunFolder, text: str) -> None:
    write_error_file(run_folder, 0, "x", modified_at=1)
    next(run_folder.error_files.rglob("error.json")).write_text(text)

    failure = find_failure(run_folder)

    assert (failure.error_type, failure.message) == ("UnknownError", text)


def test_invalid_exit_code_file_is_ignored(run_folder: RunFolder) -> None:
    run_folder.rank_exits.write_text("[1]")

    assert find_first_failure(read_failures(run_folder)) is None
