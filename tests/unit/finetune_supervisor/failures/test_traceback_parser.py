"""What is read from the output of programs that record nothing."""

import pytest

from finetune_supervisor.failures.rank_failures import RankFailure, rank_ended
from finetune_supervisor.failures.traceback_parser import (
    explain,
    explain_all,
    find_cause,
    find_raised,
    last_line,
    read_report,
)

OWN = """\
step 1 loss 2.3
Traceback (most recent call last):
  File "/workspace/train.py", line 10, in <module>
    raise ValueError("row 7 has no label")
ValueError: row 7 has no label
"""
MIXED = """\
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
CHAINED = """\
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
REPORT = """
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
LAUNCHER = """\
Traceback (most recent call last):
  File "/usr/bin/torchrun", line 8, in <module>
    sys.exit(main())
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
"""


def test_an_exception_has_a_type_a_message_and_a_stack() -> None:
    (raised,) = find_raised(OWN)

    assert (raised.rank, raised.error_type, raised.message) == (None, "ValueError", "row 7 has no label")
    assert raised.stack.startswith("Traceback")
    assert raised.stack.endswith("ValueError: row 7 has no label")


def test_lines_of_two_ranks_are_told_apart() -> None:
    assert [(raised.rank, raised.error_type) for raised in find_raised(MIXED)] == [
        (1, "ValueError"),
        (0, "RuntimeError"),
    ]


def test_who_lost_its_peers_is_not_the_cause_though_it_speaks_last() -> None:
    cause = find_cause(MIXED, rank=None)

    assert cause is not None
    assert cause.rank == 1


def test_a_rank_that_is_known_is_believed() -> None:
    cause = find_cause(MIXED, rank=0)

    assert cause is not None
    assert cause.error_type == "RuntimeError"


def test_another_ranks_exception_explains_nothing() -> None:
    assert find_cause(MIXED, rank=7) is None


def test_of_a_chain_the_last_link_is_told() -> None:
    cause = find_cause(CHAINED, rank=None)

    assert cause is not None
    assert (cause.error_type, cause.message) == ("ConfigError", "no config")


def test_a_message_may_have_more_lines() -> None:
    text = OWN.replace("row 7 has no label\n", "two keys do not fit:\n\tsize of a\n\tsize of b\nstep 2\n")

    (raised,) = find_raised(text)

    assert raised.message == "two keys do not fit:\n\tsize of a\n\tsize of b"


def test_a_syntax_error_has_no_header() -> None:
    text = "  File \"/workspace/train.py\", line 3\n    def f(\n         ^\nSyntaxError: '(' was never closed\n"

    cause = find_cause(text, rank=None)

    assert cause is not None
    assert (cause.error_type, cause.message) == ("SyntaxError", "'(' was never closed")


@pytest.mark.parametrize("text", ["", "step 1\nWarning: slow\n", "Traceback (most recent call last):\n"])
def test_where_nothing_was_raised_nothing_is_found(text: str) -> None:
    assert find_cause(text, rank=None) is None


def test_what_was_caught_before_is_not_the_cause() -> None:
    text = OWN.replace("ValueError", "TimeoutError").replace("row 7 has no label", "try again") + OWN

    cause = find_cause(text, rank=None)

    assert cause is not None
    assert cause.error_type == "ValueError"


def test_a_launchers_own_exception_only_passes_on() -> None:
    told = read_report(OWN + REPORT.format(code=1) + LAUNCHER, code=1, time=5.0)

    assert (told.error_type, told.message, told.local_rank, told.exit_code) == (
        "ValueError",
        "row 7 has no label",
        1,
        1,
    )


def rank_of(failure: RankFailure) -> int | None:
    return failure.local_rank


def test_a_victim_that_torchrun_noticed_first_does_not_hide_who_raised() -> None:
    """It aborts while it ends, and torchrun then ends the rank that raised before that has exited."""
    aborted, terminated = rank_ended(0, -6, 5.0), rank_ended(1, -15, 5.0)

    victim, cause = explain_all((aborted, terminated), MIXED, rank_of=rank_of)

    assert (victim.error_type, victim.victim, victim.signal) == ("RuntimeError", True, None)
    assert (cause.error_type, cause.message, cause.victim, cause.signal) == (
        "ValueError",
        "row 7 has no label",
        False,
        None,
    )


def test_what_a_rank_logged_before_torchrun_ended_it_explains_nothing_while_there_is_a_cause() -> None:
    killed, terminated = rank_ended(0, -9, 5.0), rank_ended(1, -15, 5.0)

    assert explain_all((killed, terminated), MIXED, rank_of=rank_of) == (killed, terminated)


def test_a_crash_is_not_explained_by_what_was_caught_before() -> None:
    crashed = rank_ended(1, -6, 5.0)

    assert explain_all((crashed,), MIXED, rank_of=rank_of) == (crashed,)


def test_torchrun_reports_a_killed_rank() -> None:
    told = read_report(REPORT.format(code=-9) + LAUNCHER, code=1, time=5.0)

    assert (told.error_type, told.signal, told.local_rank, told.victim) == ("RankKilled", 9, 1, False)


@pytest.mark.parametrize("error", ["TimeoutError: timed out", "ConnectionError: end of stream", "BrokenPipeError"])
def test_a_program_that_speaks_to_its_peers_itself_is_their_victim(error: str) -> None:
    told = read_report(
        f'Traceback (most recent call last):\n  File "train.py", line 3, in <module>\n{error}\n', code=1, time=5.0
    )

    assert told.victim
    assert told.error_type == error.partition(":")[0]


def test_a_program_without_torchrun_is_told_by_its_own_end() -> None:
    assert read_report("usage: train [-h]\n", code=2, time=5.0).error_type == "RankExited"
    assert read_report("", code=-11, time=5.0).signal == 11


def test_a_killed_rank_is_not_explained_by_what_others_printed() -> None:
    killed = rank_ended(1, -9, 5.0)

    assert explain(killed, OWN, rank=1) == killed


@pytest.mark.parametrize(
    ("text", "line"),
    [
        pytest.param("", "", id="silence"),
        pytest.param("train: error: --lr is required\n\n", "train: error: --lr is required", id="an error"),
        pytest.param("10%\r50%\r100%", "100%", id="a progress bar"),
        pytest.param("no GPU\n" + REPORT.format(code=3), "no GPU", id="before torchrun's report"),
    ],
)
def test_the_last_line_that_says_something(text: str, line: str) -> None:
    assert last_line(text, rank=None) == line
    assert last_line(text, rank=1) == line


def test_what_another_rank_said_last_is_not_this_ones() -> None:
    """A peer that lost it says so later than the rank that exited, and would make a victim of it."""
    said = "no licence left\n[rank2]: DistBackendError: Connection closed by peer\n"

    assert last_line(said, rank=3) == "no licence left"
    assert last_line(said + "[rank3]: I gave up\n[rank2]: bye\n", rank=3) == "I gave up"
