"""Reads the failures of ranks from error files and exit codes, and finds the first failure."""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from finetune_supervisor.contract import RunFolder, parse_json
from finetune_supervisor.peer_loss import is_victim

_WORKER_SIGNAL = re.compile(r"DataLoader worker \(pid \d+\) is killed by signal: .*")


@dataclass(frozen=True)
class RankFailure:
    """Failure of one rank or of the launcher; a victim failed only because another rank failed."""

    local_rank: int | None  # None for the launcher or an unknown rank
    error_type: str
    message: str
    time: float
    stack: str = ""
    exit_code: int | None = None
    signal: int | None = None
    victim: bool = False


Failures = tuple[RankFailure, ...]


@dataclass(frozen=True)
class RankExit:
    """Exit of a failed rank, recorded by the launcher; a negative code is a signal number."""

    code: int
    time: float


def find_first_failure(failures: Failures) -> RankFailure | None:
    """Return the earliest failure that is not a victim, or the earliest victim if all are victims."""
    causes = [failure for failure in failures if not failure.victim]
    return min(causes or failures, key=lambda failure: failure.time, default=None)


def read_failures(run_folder: RunFolder) -> Failures:
    """Read the failures of all ranks of this node, or the failure of the launcher if no rank failed."""
    exits = _read_rank_exits(run_folder.rank_exits)
    with_error_file = {
        local_rank: _read_error_file(local_rank, path, exits.get(local_rank))
        for local_rank, path in _find_error_files(run_folder).items()
    }
    without_error_file = {
        local_rank: build_failure_from_exit_code(local_rank, rank_exit.code, rank_exit.time)
        for local_rank, rank_exit in exits.items()
        if local_rank not in with_error_file
    }
    if not with_error_file and not without_error_file and run_folder.launcher_error.is_file():
        return (_read_error_file(None, run_folder.launcher_error, None),)
    return (*with_error_file.values(), *without_error_file.values())


def _read_error_file(local_rank: int | None, path: Path, rank_exit: RankExit | None) -> RankFailure:
    """Read an error file in the format of torchrun's @record.

    The failure time is the file's mtime, because the recorded timestamp has only whole seconds.
    """
    error_type, message, stack = _parse_error_file(path)
    return RankFailure(
        local_rank=local_rank,
        error_type=error_type,
        message=message,
        stack=stack,
        time=path.stat().st_mtime,
        exit_code=rank_exit.code if rank_exit else None,
        victim=is_victim(error_type, message),
    )


def build_failure_from_exit_code(local_rank: int | None, code: int, time: float) -> RankFailure:
    """Return the failure of a rank or program without an error file; a negative code is a signal number."""
    if code >= 0:
        message = f"exited with code {code} without an exception; its last lines are in the log"
        return RankFailure(local_rank, "RankExited", message, time, exit_code=code)
    number = -code
    message = f"ended by signal {number} ({_get_signal_name(number)})"
    if number == signal.SIGKILL:
        message += "; unless it was killed on purpose, the node or the container ran out of memory"
    return RankFailure(
        local_rank,
        "RankKilled",
        message,
        time,
        exit_code=code,
        signal=number,
        victim=number == signal.SIGTERM,  # after a failure, the launcher sends SIGTERM to the other ranks
    )


def find_worker_signal(message: str, output: str) -> str:
    """Return the line that names the signal which ended a data loader's worker, for torch's message without it."""
    signals = _WORKER_SIGNAL.findall(output) if re.match(r"DataLoader worker .* exited unexpectedly$", message) else ()
    return signals[-1] if signals else message


def _find_error_files(run_folder: RunFolder) -> Mapping[int, Path]:
    """Return the error files by local rank, found at <run id>/attempt_0/<local rank>/error.json."""
    paths = run_folder.error_files.glob("*/attempt_*/*/error.json")
    return {int(path.parent.name): path for path in paths if path.parent.name.isdigit()}


def _parse_error_file(path: Path) -> tuple[str, str, str]:
    """Return type, message and stack; a file in an unknown format is returned as the message."""
    text = path.read_text(encoding="utf-8", errors="replace")
    try:
        record = parse_json(text)["message"]
        error, stack = str(record["message"]), str(record["extraInfo"]["py_callstack"])
    except (ValueError, KeyError, TypeError):
        return "UnknownError", text.strip(), ""
    error_type, _, message = error.partition(": ")
    return error_type, message, stack


def _read_rank_exits(path: Path) -> dict[int, RankExit]:
    try:
        raw = parse_json(path.read_text(encoding="utf-8"))
        return {
            int(local_rank): RankExit(int(value["code"]), float(value["time"])) for local_rank, value in raw.items()
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def _get_signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return "unknown"
