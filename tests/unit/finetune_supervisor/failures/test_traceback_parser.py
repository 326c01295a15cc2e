"""Tests of parsing failures from the output of programs without error files."""

import pytest

from finetune_supervisor.failures.rank_failures import RankFailure, build_failure_from_exit_code
from finetune_supervisor.failures.traceback_parser import (
    explain_failure,
    explain_failures,
    find_last_line,
    find_root_exception,
    parse_exceptions,
    parse_failure_report,
)

USER_EXCEPTION = """\
step 1 loss 2.3
Traceback (most recent call last):
  File "/workspace/train.py", line 10, in <module>
    raise ValueError("row 7 has no label")
ValueError: row 7 has no label
"""
CONNECTION_LOST = "[gloo/pair.cc:553] Connection closed by peer [10.0.0.1]:63194."


INTERLEAVED_EXCEPTIONS = f"""\
[rank1]: Traceback (most recent call last):
[rank0]: Traceback (most recent call last):
[rank1]:   File "/workspace/train.py", line 10, in <module>
[rank0]:   File "/workspace/train.py", line 8, in <module>
[rank1]:     raise ValueError("row 7 has no label")
[rank0]:     loss.backward()
[rank1]: ValueError: row 7 has no label
[rank0]:     ^^^^^^^^^^^^^^^
[rank0]: RuntimeError: {CONNECTION_LOST}
"""
CHAINED_EXCEPTIONS = """\
Traceback (most recent call last):
  File "a.py", line 1, in load
    open("x")
FileNotFoundError: [Errno 2] No such file or directory: 'x'

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "a.py", line 3, in <module>
    raise my.app.ConfigError("no config")
my.app.ConfigError: no config
"""
TORCHRUN_REPORT = """
============================================================
train.py FAILED
------------------------------------------------------------
Failures:
[1]:
  time      : 2026-11-21_15:52:55
  host      : bert-0-0
  rank      : 4 (local_rank: 0)
  exitcode  : -15 (pid: 23357)  (SIGTERM)
  error_file: <N/A>
  traceback : Signal 15 (SIGTERM) received by PID 23357
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2026-11-21_15:52:55
  host      : bert-0-0
  rank      : 5 (local_rank: 1)
  exitcode  : {code} (pid: 23358)
  error_file: <N/A>
  traceback : To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html
============================================================
"""
LAUNCHER_EXCEPTION = """\
Traceback (most recent call last):
  File "/usr/bin/torchrun", line 8, in <module>
    sys.exit(main())
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
"""


def test_exception_has_type_message_and_stack() -> None:
    (exception,) = parse_exceptions(USER_EXCEPTION)

    assert (exception.rank, exception.error_type, exception.message) == (None, "ValueError", "row 7 has no label")
    assert exception.stack.startswith("Traceback")
    assert exception.stack.endswith("ValueError: row 7 has no label")


def test_interleaved_lines_of_two_ranks_are_separated() -> None:
    assert [(exception.rank, exception.error_type) for exception in parse_exceptions(INTERLEAVED_EXCEPTIONS)] == [
        (1, "ValueError"),
        (0, "RuntimeError"),
    ]


SYNTAX_ERROR = """\
  File "/workspace/train.py", line 3
    def f(
         ^
SyntaxError: '(' was never closed
"""


@pytest.mark.parametrize(
    ("text", "rank", "error_type", "message"),
    [
        pytest.param(INTERLEAVED_EXCEPTIONS, None, "ValueError", "row 7 has no label", id="victim printed last"),
        pytest.param(INTERLEAVED_EXCEPTIONS, 0, "RuntimeError", CONNECTION_LOST, id="given rank"),
        pytest.param(CHAINED_EXCEPTIONS, None, "ConfigError", "no config", id="last of a chain"),
        pytest.param(SYNTAX_ERROR, None, "SyntaxError", "'(' was never closed", id="no traceback header"),
        pytest.param(
            USER_EXCEPTION.replace("ValueError", "TimeoutError") + USER_EXCEPTION,
            None,
            "ValueError",
            "row 7 has no label",
            id="another one was logged earlier",
        ),
    ],
)
def test_root_exception_is_found(text: str, rank: int | None, error_type: str, message: str) -> None:
    cause = find_root_exception(text, rank=rank)

    assert cause is not None
    assert (cause.error_type, cause.message) == (error_type, message)


@pytest.mark.parametrize(
    ("text", "rank"),
    [
        pytest.param("", None, id="no output"),
        pytest.param("step 1\nWarning: slow\n", None, id="no exception"),
        pytest.param("Traceback (most recent call last):\n", None, id="header only"),
        pytest.param(INTERLEAVED_EXCEPTIONS, 7, id="exceptions of other ranks"),
    ],
)
def test_output_without_exception_has_no_root_exception(text: str, rank: int | None) -> None:
    assert find_root_exception(text, rank=rank) is None


def test_multi_line_message_is_parsed() -> None:
    text = USER_EXCEPTION.replace("row 7 has no label\n", "two keys do not fit:\n\tsize of a\n\tsize of b\nstep 2\n")

    (exception,) = parse_exceptions(text)

    assert exception.message == "two keys do not fit:\n\tsize of a\n\tsize of b"


@pytest.mark.parametrize("code", [1, -6], ids=["exit code 1", "SIGABRT"])
def test_exception_of_a_terminated_rank_is_the_root_cause(code: int) -> None:
    output = INTERLEAVED_EXCEPTIONS.replace("[rank1]", "[rank4]").replace("[rank0]", "[rank5]")

    failure = parse_failure_report(output + TORCHRUN_REPORT.format(code=code) + LAUNCHER_EXCEPTION, code=1, time=5.0)

    assert (failure.local_rank, failure.error_type, failure.exit_code) == (0, "ValueError", 1)
    assert (failure.victim, failure.signal) == (False, None)


@pytest.mark.parametrize(("code", "error_type"), [(-6, "RankKilled"), (-9, "RankKilled")], ids=["SIGABRT", "SIGKILL"])
def test_signal_is_the_root_cause_if_no_rank_raised_an_exception(code: int, error_type: str) -> None:
    failure = parse_failure_report(TORCHRUN_REPORT.format(code=code) + LAUNCHER_EXCEPTION, code=1, time=5.0)

    assert (failure.error_type, failure.signal, failure.local_rank, failure.victim) == (error_type, -code, 1, False)


def test_launcher_exception_is_not_the_root_cause() -> None:
    failure = parse_failure_report(
        USER_EXCEPTION + TORCHRUN_REPORT.format(code=1) + LAUNCHER_EXCEPTION, code=1, time=5.0
    )

    assert (failure.error_type, failure.message, failure.local_rank, failure.exit_code) == (
        "ValueError",
        "row 7 has no label",
        1,
        1,
    )


def find_rank(failure: RankFailure) -> int | None:
    return failure.local_rank


def test_victim_detected_first_does_not_hide_the_root_cause() -> None:
    """The victim aborts on shutdown, and torchrun terminates the rank with the exception before it exits."""
    aborted, terminated = build_failure_from_exit_code(0, -6, 5.0), build_failure_from_exit_code(1, -15, 5.0)

    victim, cause = explain_failures((aborted, terminated), INTERLEAVED_EXCEPTIONS, find_rank=find_rank)

    assert (victim.error_type, victim.victim, victim.signal) == ("RuntimeError", True, None)
    assert (cause.error_type, cause.message, cause.victim, cause.signal) == (
        "ValueError",
        "row 7 has no label",
        False,
        None,
    )


@pytest.mark.parametrize(
    "exits",
    [pytest.param(((0, -9), (1, -15)), id="another rank is the root cause"), pytest.param(((1, -6),), id="crash")],
)
def test_exception_logged_earlier_does_not_replace_a_failure(exits: tuple[tuple[int, int], ...]) -> None:
    failures = tuple(build_failure_from_exit_code(rank, code, 5.0) for rank, code in exits)

    assert explain_failures(failures, INTERLEAVED_EXCEPTIONS, find_rank=find_rank) == failures


@pytest.mark.parametrize("error", ["TimeoutError: timed out", "ConnectionError: end of stream", "BrokenPipeError"])
def test_socket_error_of_a_program_without_torch_marks_a_victim(error: str) -> None:
    failure = parse_failure_report(
        f'Traceback (most recent call last):\n  File "train.py", line 3, in <module>\n{error}\n', code=1, time=5.0
    )

    assert failure.victim
    assert failure.error_type == error.partition(":")[0]


def test_program_without_torchrun_fails_with_its_exit_code() -> None:
    assert parse_failure_report("usage: train [-h]\n", code=2, time=5.0).error_type == "RankExited"
    assert parse_failure_report("", code=-11, time=5.0).signal == 11


def test_killed_rank_is_not_attributed_to_an_exception_of_another_rank() -> None:
    killed = build_failure_from_exit_code(1, -9, 5.0)

    assert explain_failure(killed, USER_EXCEPTION, rank=1) == killed


@pytest.mark.parametrize(
    ("output", "last_line"),
    [
        pytest.param("", "", id="no output"),
        pytest.param("train: error: --lr is required\n\n", "train: error: --lr is required", id="error line"),
        pytest.param("10%\r50%\r100%", "100%", id="progress bar"),
        pytest.param("no GPU\n" + TORCHRUN_REPORT.format(code=3), "no GPU", id="before torchrun's report"),
    ],
)
def test_last_non_empty_line_is_found(output: str, last_line: str) -> None:
    assert find_last_line(output, rank=None) == last_line
    assert find_last_line(output, rank=1) == last_line


def test_last_line_of_another_rank_is_ignored() -> None:
    """A line of a peer about the lost connection would wrongly identify the failed rank as a victim."""
    output = "no licence left\n[rank2]: DistBackendError: Connection closed by peer\n"

    assert find_last_line(output, rank=3) == "no licence left"
    assert find_last_line(output + "[rank3]: I gave up\n[rank2]: bye\n", rank=3) == "I gave up"
