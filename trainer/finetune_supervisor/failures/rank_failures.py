"""Why ranks failed: error files and exit codes, and which of several failures came first."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from finetune_supervisor.contract import RunFolder

# A rank that fails this way was left alone by another one, whose failure is the cause: what torch.distributed raises,
# what Python's own sockets do in programs that speak to their peers themselves, and a launcher that was told to end.
_VICTIM_TYPES = frozenset(
    {"DistBackendError", "DistNetworkError", "DistStoreError", "SignalException", "TimeoutError", "ConnectionError"}
    | {error.__name__ for error in ConnectionError.__subclasses__()}
)
_VICTIM_TEXT = re.compile(
    r"connection (closed|reset) by peer|connection refused|broken pipe|read error|socket timeout"
    r"|timed out waiting|NCCL (error|timeout)|watchdog caught collective|collective operation timeout"
    r"|gloo.*timed? ?out|TCPStore",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class RankFailure:
    """How one rank of this node, or the launcher, failed."""

    local_rank: int | None  # None: the launcher itself, or a rank that is not known
    error_type: str
    message: str
    time: float
    stack: str = ""
    exit_code: int | None = None
    signal: int | None = None
    victim: bool = False


Failures = tuple[RankFailure, ...]


@dataclass(frozen=True)
class Exit:
    """What the launcher saw when it waited for a failed rank; a negative code is a signal."""

    code: int
    time: float


def first_failure(
    run: RunFolder, *, explain: Callable[[Failures], Failures] = lambda failures: failures
) -> RankFailure | None:
    """The earliest failure on this node; those that only echo another rank's are set aside while there is one."""
    failures = explain(read_failures(run))
    causes = [failure for failure in failures if not failure.victim]
    return min(causes or failures, key=lambda failure: failure.time, default=None)


def read_failures(run: RunFolder) -> tuple[RankFailure, ...]:
    exits = _read_exits(run.exits)
    raised = {
        local_rank: _raised(local_rank, path, exits.get(local_rank)) for local_rank, path in _error_files(run).items()
    }
    ended = {
        local_rank: rank_ended(local_rank, seen.code, seen.time)
        for local_rank, seen in exits.items()
        if local_rank not in raised
    }
    if not raised and not ended and run.launcher_error.is_file():
        return (_raised(None, run.launcher_error, None),)
    return (*raised.values(), *ended.values())


def _raised(local_rank: int | None, path: Path, seen: Exit | None) -> RankFailure:
    """From the file that @record wrote; its own time has whole seconds only, the file's has more."""
    error_type, message, stack = _parse_error_file(path)
    return RankFailure(
        local_rank=local_rank,
        error_type=error_type,
        message=message,
        stack=stack,
        time=path.stat().st_mtime,
        exit_code=seen.code if seen else None,
        victim=is_victim(error_type, message),
    )


def is_victim(error_type: str, message: str) -> bool:
    """Whether this is what a rank raises when another one is gone."""
    return error_type in _VICTIM_TYPES or _VICTIM_TEXT.search(message) is not None


def rank_ended(local_rank: int | None, code: int, time: float) -> RankFailure:
    """A rank, or a whole program, without an error file: killed, or gone without raising."""
    if code >= 0:
        message = f"exited with code {code} without an exception; its last lines are in the log"
        return RankFailure(local_rank, "RankExited", message, time, exit_code=code)
    number = -code
    message = f"ended by signal {number} ({_signal_name(number)})"
    if number == signal.SIGKILL:
        message += "; if nobody killed it, the node or the container ran out of memory"
    return RankFailure(
        local_rank,
        "RankKilled",
        message,
        time,
        exit_code=code,
        signal=number,
        victim=number == signal.SIGTERM,  # the others are ended so when one has failed
    )


def _error_files(run: RunFolder) -> Mapping[int, Path]:
    """By local rank: <run id>/attempt_0/<local rank>/error.json."""
    found = run.torchrun.glob("*/attempt_*/*/error.json")
    return {int(path.parent.name): path for path in found if path.parent.name.isdigit()}


def _parse_error_file(path: Path) -> tuple[str, str, str]:
    """Type, message and stack; a file that is not what @record writes is quoted as it is."""
    text = path.read_text(encoding="utf-8", errors="replace")
    try:
        said = json.loads(text)["message"]
        error, stack = str(said["message"]), str(said["extraInfo"]["py_callstack"])
    except (ValueError, KeyError, TypeError):
        return "UnknownError", text.strip(), ""
    error_type, _, message = error.partition(": ")
    return error_type, message, stack


def _read_exits(path: Path) -> dict[int, Exit]:
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        return {int(local_rank): Exit(int(seen["code"]), float(seen["time"])) for local_rank, seen in raw.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return "unknown"
