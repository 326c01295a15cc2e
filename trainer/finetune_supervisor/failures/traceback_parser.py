"""Finds the failure of a program without error files in its output: printed exceptions and torchrun's report.

The reasons are in decisions/306.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from finetune_supervisor.failures.rank_failures import Failures, RankFailure, failure_from_exit_code
from finetune_supervisor.peer_loss import is_victim

_HEADER = "Traceback (most recent call last):"
_RANK = re.compile(r"^\[rank(\d+)\]:(?: |$)")
_FILE = re.compile(r'^  File ".*", line \d+')
_LAST = re.compile(r"^((?:[A-Za-z_]\w*\.)*[A-Z]\w*)(?:: ?(.*))?$")
_ROOT_CAUSE = re.compile(
    r"Root Cause \(first observed failure\):.*?\brank\s*: (\d+) \(local_rank: (\d+)\).*?\bexitcode\s*: (-?\d+)",
    re.DOTALL,
)
_LAUNCHER_ERRORS = frozenset({"CalledProcessError", "ChildFailedError", "SignalException"})


@dataclass
class PrintedException:
    """An exception that the interpreter printed; `rank` is that of the prefix of its lines."""

    rank: int | None
    error_type: str = ""
    message: str = ""
    lines: list[str] = field(default_factory=list)

    @property
    def stack(self) -> str:
        return "\n".join(self.lines)


def parse_exceptions(text: str) -> tuple[PrintedException, ...]:
    """Return the printed exceptions in the order of their last lines; prefixed lines of several ranks may alternate."""
    exceptions: list[PrintedException] = []
    open_by_rank: dict[int | None, PrintedException] = {}
    closed_by_rank: dict[int | None, PrintedException] = {}
    for rank, line in _split_rank_prefixes(text):
        block = open_by_rank.get(rank)
        if line.startswith(_HEADER) or (block is None and _FILE.match(line)):
            open_by_rank[rank] = PrintedException(rank, lines=[line])
            closed_by_rank.pop(rank, None)
        elif block is not None:
            block.lines.append(line)
            last = _LAST.match(line)
            if last and any(_FILE.match(earlier) for earlier in block.lines):
                block.error_type, block.message = last.group(1).rpartition(".")[2], last.group(2) or ""
                exceptions.append(block)
                closed_by_rank[rank] = open_by_rank.pop(rank)
        elif rank in closed_by_rank and line.startswith((" ", "\t")) and len(closed_by_rank[rank].message) < 2000:
            closed_by_rank[rank].message += "\n" + line  # a message of several lines
        else:
            closed_by_rank.pop(rank, None)
    return tuple(exceptions)


def find_root_exception(text: str, *, rank: int | None) -> PrintedException | None:
    """Return the last exception, of this rank if it is known, that is neither a victim's nor a launcher's, if possible.

    The last one, because exceptions that were caught and logged precede the one that ended the program.
    """
    exceptions = parse_exceptions(text)
    if rank is not None:
        of_rank = tuple(exception for exception in exceptions if exception.rank == rank)
        exceptions = of_rank or tuple(exception for exception in exceptions if exception.rank is None)
    return max(enumerate(exceptions), key=_relevance, default=(0, None))[1]


def _relevance(indexed: tuple[int, PrintedException]) -> tuple[bool, bool, int]:
    index, exception = indexed
    return (
        exception.error_type not in _LAUNCHER_ERRORS,
        not is_victim(exception.error_type, exception.message),
        index,
    )


def explain_failures(failures: Failures, text: str, *, rank_of: Callable[[RankFailure], int | None]) -> Failures:
    """Return the failures with the exceptions that their ranks printed.

    torchrun may notice a victim first and terminate the rank that raised the original exception before that rank has
    exited. If all failures are victims, the exceptions of terminated ranks are used, too.
    """
    explained = tuple(explain_failure(failure, text, rank=rank_of(failure)) for failure in failures)
    if not all(failure.victim for failure in explained):
        return explained
    return tuple(_explain_terminated(failure, text, rank=rank_of(failure)) for failure in explained)


def explain_failure(failure: RankFailure, text: str, *, rank: int | None) -> RankFailure:
    """Return the failure with the exception that its rank printed; a killed rank has printed none.

    A rank may abort after it raised an exception, while the threads of its collectives end. The exception then replaces
    the abort only if it shows that the rank was a victim.
    """
    if failure.error_type == "RankExited":
        exception = find_root_exception(text, rank=rank)
        return failure if exception is None else _with_exception(failure, exception)
    if failure.signal == signal.SIGABRT and (exception := _last_exception(rank, text)):
        victim = is_victim(exception.error_type, exception.message)
        return _with_exception(failure, exception) if victim else failure
    return failure


def _explain_terminated(failure: RankFailure, text: str, *, rank: int | None) -> RankFailure:
    exception = _last_exception(rank, text) if failure.signal == signal.SIGTERM else None
    if exception is None or exception.error_type in _LAUNCHER_ERRORS:
        return failure
    return _with_exception(failure, exception)


def _last_exception(rank: int | None, text: str) -> PrintedException | None:
    """Return the last exception whose lines have the prefix of this rank."""
    if rank is None:
        return None
    return next((exception for exception in reversed(parse_exceptions(text)) if exception.rank == rank), None)


def _with_exception(failure: RankFailure, exception: PrintedException) -> RankFailure:
    return replace(
        failure,
        error_type=exception.error_type,
        message=exception.message,
        stack=exception.stack,
        signal=None,
        victim=is_victim(exception.error_type, exception.message),
    )


def parse_failure_report(text: str, *, code: int, time: float) -> RankFailure:
    """Return the failure of a user's launcher from its output: torchrun's root cause, or the launcher's exit code."""
    root_causes = _ROOT_CAUSE.findall(text)
    if root_causes:
        rank, local_rank, exit_code = (int(number) for number in root_causes[-1])
        failure = explain_failure(failure_from_exit_code(local_rank, exit_code, time), text, rank=rank)
        return _find_cause(failure, text, first_rank=rank - local_rank)
    return explain_failure(failure_from_exit_code(None, code, time), text, rank=None)


def _find_cause(failure: RankFailure, text: str, *, first_rank: int) -> RankFailure:
    """Return the failure of the rank that printed the original exception, if torchrun's root cause is a victim of it.

    torchrun may notice an aborting victim first and terminate the rank with the exception before it has exited.
    first_rank: of this node.
    """
    if not failure.victim and failure.signal != signal.SIGABRT:
        return failure
    cause = find_root_exception(text, rank=None)
    if cause is None or cause.rank is None or is_victim(cause.error_type, cause.message):
        return failure
    return _with_exception(failure_from_exit_code(cause.rank - first_rank, 1, failure.time), cause)


def find_last_line(text: str, *, rank: int | None) -> str:
    """Return the last line before torchrun's report of this rank, or of lines without a rank prefix.

    A carriage return, as progress bars use it, starts a new line.
    """
    numbered = _split_rank_prefixes(text.partition("\n" + "=" * 60)[0].rstrip("\r\n"))
    lines = (line.rpartition("\r")[2].strip() for prefix, line in numbered if rank is None or prefix in (None, rank))
    return next((line for line in reversed([*lines]) if line and "torch/distributed/elastic" not in line), "")


def _split_rank_prefixes(text: str) -> Iterator[tuple[int | None, str]]:
    """Yield each line with the rank of its `[rank0]:` prefix, without the prefix."""
    for line in text.splitlines():
        prefix = _RANK.match(line)
        yield (int(prefix.group(1)), line[prefix.end() :]) if prefix else (None, line)
