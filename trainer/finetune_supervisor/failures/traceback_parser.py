"""Parses exceptions and torchrun's failure report from the output of a program that wrote no error files.

See decisions/306.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from finetune_supervisor.error_text import select_line
from finetune_supervisor.failures.rank_failures import Failures, RankFailure, build_failure_from_exit_code
from finetune_supervisor.peer_loss import is_victim

_TRACEBACK_HEADER = "Traceback (most recent call last):"
_RANK_PREFIX = re.compile(r"^\[rank(\d+)\]:(?: |$)")
_FRAME_LINE = re.compile(r'^  File ".*", line \d+')
_EXCEPTION_LINE = re.compile(r"^((?:[A-Za-z_]\w*\.)*[A-Z]\w*)(?:: ?(.*))?$")
_ROOT_CAUSE_REPORT = re.compile(
    r"Root Cause \(first observed failure\):.*?\brank\s*: (\d+) \(local_rank: (\d+)\).*?\bexitcode\s*: (-?\d+)",
    re.DOTALL,
)
_LAUNCHER_ERRORS = frozenset({"CalledProcessError", "ChildFailedError", "SignalException"})


@dataclass
class PrintedException:
    """Exception printed by the interpreter; `rank` is taken from the prefix of its lines."""

    rank: int | None
    error_type: str = ""
    message: str = ""
    lines: list[str] = field(default_factory=list)

    @property
    def stack(self) -> str:
        return "\n".join(self.lines)


def parse_exceptions(text: str) -> tuple[PrintedException, ...]:
    """Return the exceptions in the order of their last lines; prefixed lines of several ranks may be interleaved."""
    exceptions: list[PrintedException] = []
    open_by_rank: dict[int | None, PrintedException] = {}
    closed_by_rank: dict[int | None, PrintedException] = {}
    for rank, line in _split_rank_prefixes(text):
        block = open_by_rank.get(rank)
        if line.startswith(_TRACEBACK_HEADER) or (block is None and _FRAME_LINE.match(line)):
            open_by_rank[rank] = PrintedException(rank, lines=[line])
            closed_by_rank.pop(rank, None)
        elif block is not None:
            block.lines.append(line)
            exception_line = _EXCEPTION_LINE.match(line)
            if exception_line and any(_FRAME_LINE.match(block_line) for block_line in block.lines):
                block.error_type, block.message = (
                    exception_line.group(1).rpartition(".")[2],
                    exception_line.group(2) or "",
                )
                exceptions.append(block)
                closed_by_rank[rank] = open_by_rank.pop(rank)
        elif rank in closed_by_rank and line.startswith((" ", "\t")) and len(closed_by_rank[rank].message) < 2000:
            closed_by_rank[rank].message += "\n" + line  # continuation line of the message
        else:
            closed_by_rank.pop(rank, None)
    return tuple(exceptions)


def find_root_exception(text: str, *, rank: int | None) -> PrintedException | None:
    """Return the last exception of this rank, or of all ranks if `rank` is None.

    Exceptions of victims and launchers are returned only if there are no others. The last exception is used, because
    earlier ones may have been caught and logged.
    """
    exceptions = parse_exceptions(text)
    if rank is not None:
        rank_exceptions = tuple(exception for exception in exceptions if exception.rank == rank)
        exceptions = rank_exceptions or tuple(exception for exception in exceptions if exception.rank is None)
    return max(enumerate(exceptions), key=_get_relevance, default=(0, None))[1]


def _get_relevance(indexed_exception: tuple[int, PrintedException]) -> tuple[bool, bool, int]:
    index, exception = indexed_exception
    return (
        exception.error_type not in _LAUNCHER_ERRORS,
        not is_victim(exception.error_type, exception.message),
        index,
    )


def explain_failures(failures: Failures, text: str, *, find_rank: Callable[[RankFailure], int | None]) -> Failures:
    """Add to each failure the exception that its rank printed.

    torchrun may detect a victim first and terminate the rank that raised the original exception. Therefore, if all
    failures are victims, the exceptions of terminated ranks are used as well.
    """
    explained = tuple(explain_failure(failure, text, rank=find_rank(failure)) for failure in failures)
    if not all(failure.victim for failure in explained):
        return explained
    return tuple(_explain_terminated_rank(failure, text, rank=find_rank(failure)) for failure in explained)


def explain_failure(failure: RankFailure, text: str, *, rank: int | None) -> RankFailure:
    """Add to the failure the exception that its rank printed, unless the rank was killed.

    A rank may abort after it raised an exception, while the threads of its collectives exit. In that case the exception
    replaces the abort only if it shows that the rank was a victim.
    """
    if failure.error_type == "RankExited":
        exception = find_root_exception(text, rank=rank)
        return failure if exception is None else _add_exception(failure, exception)
    if failure.signal == signal.SIGABRT and (exception := _find_last_exception(rank, text)):
        victim = is_victim(exception.error_type, exception.message)
        return _add_exception(failure, exception) if victim else failure
    return failure


def _explain_terminated_rank(failure: RankFailure, text: str, *, rank: int | None) -> RankFailure:
    exception = _find_last_exception(rank, text) if failure.signal == signal.SIGTERM else None
    if exception is None or exception.error_type in _LAUNCHER_ERRORS:
        return failure
    return _add_exception(failure, exception)


def _find_last_exception(rank: int | None, text: str) -> PrintedException | None:
    """Return the last exception with the line prefix of this rank."""
    if rank is None:
        return None
    return next((exception for exception in reversed(parse_exceptions(text)) if exception.rank == rank), None)


def _add_exception(failure: RankFailure, exception: PrintedException) -> RankFailure:
    return replace(
        failure,
        error_type=exception.error_type,
        message=exception.message,
        stack=exception.stack,
        signal=None,
        victim=is_victim(exception.error_type, exception.message),
    )


def parse_failure_report(text: str, *, code: int, time: float) -> RankFailure:
    """Return the root cause that torchrun reported, or else a failure with the launcher's exit code."""
    root_causes = _ROOT_CAUSE_REPORT.findall(text)
    if root_causes:
        rank, local_rank, exit_code = (int(number) for number in root_causes[-1])
        failure = explain_failure(build_failure_from_exit_code(local_rank, exit_code, time), text, rank=rank)
        return _find_original_failure(failure, text, first_rank=rank - local_rank)
    return explain_failure(build_failure_from_exit_code(None, code, time), text, rank=None)


def _find_original_failure(failure: RankFailure, text: str, *, first_rank: int) -> RankFailure:
    """Replace torchrun's root cause if it is only a victim of a rank that raised an exception.

    torchrun may detect an aborted victim first and terminate the rank with the exception before it exits.
    `first_rank`: first global rank of this node.
    """
    if not failure.victim and failure.signal != signal.SIGABRT:
        return failure
    cause = find_root_exception(text, rank=None)
    if cause is None or cause.rank is None or is_victim(cause.error_type, cause.message):
        return failure
    return _add_exception(build_failure_from_exit_code(cause.rank - first_rank, 1, failure.time), cause)


def find_last_line(text: str, *, rank: int | None) -> str:
    """Return the last line with words before torchrun's report that has the prefix of this rank or no rank prefix.

    A carriage return of a progress bar starts a new line.
    """
    prefixed_lines = _split_rank_prefixes(text.partition("\n" + "=" * 60)[0].rstrip("\r\n"))
    lines = (
        line.rpartition("\r")[2].strip() for prefix, line in prefixed_lines if rank is None or prefix in (None, rank)
    )
    return select_line("\n".join(line for line in lines if "torch/distributed/elastic" not in line))


def _split_rank_prefixes(text: str) -> Iterator[tuple[int | None, str]]:
    """Yield each line as its rank and its text without the `[rank0]:` prefix; without a prefix, the rank is None."""
    for line in text.splitlines():
        prefix = _RANK_PREFIX.match(line)
        yield (int(prefix.group(1)), line[prefix.end() :]) if prefix else (None, line)
