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
INTERLEAVED_EXCEPTIONS = """\
[rank1]: Traceback (most recent call last):
[rank0]: Traceback (most recent call last):
[rank1]:   File "/workspace/train.py", line 10, in <module>
[rank0]:   File "/workspace/train.py", line 8, in <module>
[rank1]:     raise ValueError("row 7 has no label")
[rank0]:     loss.backward()
[rank1]: ValueError: row 7 has no label
[rank0]:     ^^^^^^^^^^^^^^^
[rank0]: RuntimeError: [gloo/pair.cc:553] Connection closed by peer [10.0.0.1]:63194.
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


def test_victim_printed_last_is_not_the_root_exception() -> None:
    cause = find_root_exception(INTERLEAVED_EXCEPTIONS, rank=None)

    assert cause is not None
    assert cause.rank == 1


def test_root_exception_of_a_given_rank_is_found() -> None:
    cause = find_root_exception(INTERLEAVED_EXCEPTIONS, rank=0)

    assert cause is not None
    assert cause.error_type == "RuntimeError"


def test_exceptions_of_other_ranks_are_ignored() -> None:
    assert find_root_exception(INTERLEAVED_EXCEPTIONS, rank=7) is None


def test_last_exception_of_a_chain_is_the_root_exception() -> None:
    cause = find_root_exception(CHAINED_EXCEPTIONS, rank=None)

    assert cause is not None
    assert (cause.error_type, cause.message) == ("ConfigError", "no config")


def test_multi_line_message_is_parsed() -> None:
    text = USER_EXCEPTION.replace("row 7 has no label\n", "two keys do not fit:\n\tsize of a\n\tsize of b\nstep 2\n")

    (exception,) = parse_exceptions(text)

    assert exception.message == "two keys do not fit:\n\tsize of a\n\tsize of b"


def test_syntax_error_without_traceback_header_is_parsed() -> None:
    text = "  File \"/workspace/train.py\", line 3\n    def f(\n         ^\nSyntaxError: '(' was never closed\n"

    cause = find_root_exception(text, rank=None)

    assert cause is not None
    assert (cause.error_type, cause.message) == ("SyntaxError", "'(' was never closed")


@pytest.mark.parametrize("text", ["", "step 1\nWarning: slow\n", "Traceback (most recent call last):\n"])
def test_output_without_exception_has_no_root_exception(text: str) -> None:
    assert find_root_exception(text, rank=None) is None


@pytest.mark.parametrize("code", [1, -6], ids=["exit code 1", "SIGABRT"])
def test_exception_of_a_terminated_rank_is_the_root_cause(code: int) -> None:
    output = INTERLEAVED_EXCEPTIONS.replace("[rank1]", "[rank4]").replace("[rank0]", "[rank5]")

    failure = parse_failure_report(output + TORCHRUN_REPORT.format(code=code) + LAUNCHER_EXCEPTION, code=1, time=5.0)

    assert (failure.local_rank, failure.error_type, failure.exit_code) == (0, "ValueError", 1)
    assert (failure.victim, failure.signal) == (False, None)


def test_abort_is_the_root_cause_if_no_other_rank_raised_an_exception() -> None:
    failure = parse_failure_report(TORCHRUN_REPORT.format(code=-6) + LAUNCHER_EXCEPTION, code=1, time=5.0)

    assert (failure.local_rank, failure.signal, failure.victim) == (1, 6, False)


def test_exception_logged_earlier_is_not_the_root_cause() -> None:
    text = (
        USER_EXCEPTION.replace("ValueError", "TimeoutError").replace("row 7 has no label", "try again") + USER_EXCEPTION
    )

    cause = find_root_exception(text, rank=None)

    assert cause is not None
    assert cause.error_type == "ValueError"


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


def test_terminated_rank_keeps_its_failure_if_another_rank_is_the_root_cause() -> None:
    killed, terminated = build_failure_from_exit_code(0, -9, 5.0), build_failure_from_exit_code(1, -15, 5.0)

    assert explain_failures((killed, terminated), INTERLEAVED_EXCEPTIONS, find_rank=find_rank) == (killed, terminated)


def test_crash_is_not_attributed_to_an_exception_logged_earlier() -> None:
    crashed = build_failure_from_exit_code(1, -6, 5.0)

    assert explain_failures((crashed,), INTERLEAVED_EXCEPTIONS, find_rank=find_rank) == (crashed,)


def test_killed_rank_is_parsed_from_the_torchrun_report() -> None:
    failure = parse_failure_report(TORCHRUN_REPORT.format(code=-9) + LAUNCHER_EXCEPTION, code=1, time=5.0)

    assert (failure.error_type, failure.signal, failure.local_rank, failure.victim) == ("RankKilled", 9, 1, False)


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
