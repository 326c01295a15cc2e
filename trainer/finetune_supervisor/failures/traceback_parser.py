"""What a program that records nothing still tells in its output: the exception of a rank, and torchrun's report."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from finetune_supervisor.failures.rank_failures import Failures, RankFailure, is_victim, rank_ended

_HEADER = "Traceback (most recent call last):"
_RANK = re.compile(r"^\[rank(\d+)\]:(?: |$)")
_FILE = re.compile(r'^  File ".*", line \d+')
_LAST = re.compile(r"^((?:[A-Za-z_]\w*\.)*[A-Z]\w*)(?:: ?(.*))?$")
_ROOT_CAUSE = re.compile(
    r"Root Cause \(first observed failure\):.*?\brank\s*: (\d+) \(local_rank: (\d+)\).*?\bexitcode\s*: (-?\d+)",
    re.DOTALL,
)
_LAUNCHERS = frozenset({"CalledProcessError", "ChildFailedError", "SignalException"})


@dataclass
class Raised:
    """An exception as the interpreter printed it, and the rank whose prefix its lines have."""

    rank: int | None
    error_type: str = ""
    message: str = ""
    lines: list[str] = field(default_factory=list)

    @property
    def stack(self) -> str:
        return "\n".join(self.lines)


def find_raised(text: str) -> tuple[Raised, ...]:
    """In the order in which they ended; lines of ranks that have a prefix may be mixed."""
    found: list[Raised] = []
    begun: dict[int | None, Raised] = {}
    ended: dict[int | None, Raised] = {}
    for rank, line in _by_rank(text):
        block = begun.get(rank)
        if line.startswith(_HEADER) or (block is None and _FILE.match(line)):
            begun[rank] = Raised(rank, lines=[line])
            ended.pop(rank, None)
        elif block is not None:
            block.lines.append(line)
            last = _LAST.match(line)
            if last and any(_FILE.match(seen) for seen in block.lines):
                block.error_type, block.message = last.group(1).rpartition(".")[2], last.group(2) or ""
                found.append(block)
                ended[rank] = begun.pop(rank)
        elif rank in ended and line.startswith((" ", "\t")) and len(ended[rank].message) < 2000:
            ended[rank].message += "\n" + line  # what the exception says on more lines than one
        else:
            ended.pop(rank, None)
    return tuple(found)


def find_cause(text: str, *, rank: int | None) -> Raised | None:
    """The last exception that explains the end: of that rank if it is known, and of no victim where there is another.

    The last, because what was caught and only logged comes before what ended the program.
    """
    found = find_raised(text)
    if rank is not None:
        found = tuple(raised for raised in found if raised.rank == rank) or tuple(r for r in found if r.rank is None)
    return max(enumerate(found), key=_weight, default=(0, None))[1]


def _weight(numbered: tuple[int, Raised]) -> tuple[bool, bool, int]:
    number, raised = numbered
    return raised.error_type not in _LAUNCHERS, not is_victim(raised.error_type, raised.message), number


def explain_all(failures: Failures, text: str, *, rank_of: Callable[[RankFailure], int | None]) -> Failures:
    """Who raised says why; torchrun may notice a victim first, and end the rank that raised before it has exited."""
    explained = tuple(explain(failure, text, rank=rank_of(failure)) for failure in failures)
    if not all(failure.victim for failure in explained):
        return explained
    return tuple(_explain_ended(failure, text, rank=rank_of(failure)) for failure in explained)


def explain(failure: RankFailure, text: str, *, rank: int | None) -> RankFailure:
    """The same failure with the exception that its rank printed; one that was killed printed none.

    A rank may abort after it has raised, while the threads of its collectives end; that matters if it was a victim.
    """
    if failure.error_type == "RankExited":
        raised = find_cause(text, rank=rank)
        return failure if raised is None else _with(failure, raised)
    if failure.signal == signal.SIGABRT and (raised := _last_of(rank, text)):
        return _with(failure, raised) if is_victim(raised.error_type, raised.message) else failure
    return failure


def _explain_ended(failure: RankFailure, text: str, *, rank: int | None) -> RankFailure:
    raised = _last_of(rank, text) if failure.signal == signal.SIGTERM else None
    if raised is None or raised.error_type in _LAUNCHERS:
        return failure
    return _with(failure, raised)


def _last_of(rank: int | None, text: str) -> Raised | None:
    """What that rank raised last, by the prefix of its lines."""
    if rank is None:
        return None
    return next((raised for raised in reversed(find_raised(text)) if raised.rank == rank), None)


def _with(failure: RankFailure, raised: Raised) -> RankFailure:
    return replace(
        failure,
        error_type=raised.error_type,
        message=raised.message,
        stack=raised.stack,
        signal=None,
        victim=is_victim(raised.error_type, raised.message),
    )


def read_report(text: str, *, code: int, time: float) -> RankFailure:
    """From the output of a launcher of the user's own: torchrun's root cause, or the program's own end."""
    seen = _ROOT_CAUSE.findall(text)
    if seen:
        rank, local_rank, exit_code = (int(number) for number in seen[-1])
        return explain(rank_ended(local_rank, exit_code, time), text, rank=rank)
    return explain(rank_ended(None, code, time), text, rank=None)


def last_line(text: str, *, rank: int | None) -> str:
    """What that rank, or nobody known, said last before torchrun reported; of a progress bar, what it came to."""
    told = _by_rank(text.partition("\n" + "=" * 60)[0].rstrip("\r\n"))
    said = (line.rpartition("\r")[2].strip() for who, line in told if rank is None or who in (None, rank))
    return next((line for line in reversed([*said]) if line and "torch/distributed/elastic" not in line), "")


def _by_rank(text: str) -> Iterator[tuple[int | None, str]]:
    for line in text.splitlines():
        prefix = _RANK.match(line)
        yield (int(prefix.group(1)), line[prefix.end() :]) if prefix else (None, line)
