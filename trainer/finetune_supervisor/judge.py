"""Judges how a node ended: from what was observed to its final termination message and exit code; no I/O."""

from __future__ import annotations

from dataclasses import dataclass, replace

from finetune_supervisor import contract
from finetune_supervisor.contract import Node
from finetune_supervisor.failures.rank_failures import Failures, RankFailure, find_first_failure
from finetune_supervisor.failures.traceback_parser import explain_failures, find_last_line, parse_failure_report
from finetune_supervisor.messages import TerminationMessage
from finetune_supervisor.stop_request import StopRequest

EXIT_SUCCEEDED, EXIT_RETRYABLE, EXIT_PERMANENT, EXIT_STOPPED = 0, 1, 2, 143
_MAX_STACK_CHARACTERS = 3000
_MAX_TAIL_CHARACTERS = 1500


@dataclass(frozen=True)
class NodeEnd:
    """What was observed when the program of a node had ended."""

    node: Node
    running: TerminationMessage  # the last message of the running node
    exit_code: int  # of the program; a negative code is a signal
    time: float  # in seconds since the epoch
    stop: StopRequest
    is_command: bool = False  # the program is a user's command, not the trainer
    is_published: bool = False  # the result is complete
    hang: RankFailure | None = None
    phases: frozenset[str] = frozenset()  # of its ranks
    failures: Failures = ()  # of its ranks, or of the launcher
    output_tail: str = ""


def judge(end: NodeEnd) -> TerminationMessage:
    """Return the final termination message of a node whose program has ended."""
    # The ranks hung. A complete result outweighs that: some libraries hang or crash on shutdown.
    if end.hang is not None:
        return succeeded(end.running, now=end.time) if end.is_published else rank_failed(end, end.hang)
    return _judge_command(end) if end.is_command else _judge_trainer(end)


def _judge_trainer(end: NodeEnd) -> TerminationMessage:
    # All ranks finished, or the result is complete.
    if (end.exit_code == 0 and end.phases == {contract.DONE}) or end.is_published:
        return succeeded(end.running, now=end.time)
    # A stop was requested, and the ranks saved a checkpoint or were ended without one.
    if end.phases == {contract.STOPPED}:
        return stopped(end.running, "stopped on request; a checkpoint was saved", now=end.time)
    if end.stop.reason:
        return stopped(end.running, end.stop.reason, now=end.time)
    # A rank failed. After a stop request, a victim failed only because its peers were stopped, too.
    failure = find_first_failure(end.failures)
    if end.stop.is_requested and (failure is None or failure.victim):
        return stopped(end.running, "stopped, but other nodes ended before a checkpoint was saved", now=end.time)
    if failure is not None:
        return rank_failed(end, failure)
    # Nothing explains the end.
    if end.exit_code == 0:
        message = "the ranks ended without an error and without a result"
        return failed(end.running, "RankExited", message, now=end.time)
    ending = f"ended by signal {-end.exit_code}" if end.exit_code < 0 else f"exited with code {end.exit_code}"
    message = f"the launcher {ending}; the end of its output:\n{end.output_tail[-_MAX_TAIL_CHARACTERS:]}"
    return failed(end.running, "LauncherFailed", message, now=end.time)


def _judge_command(end: NodeEnd) -> TerminationMessage:
    # A stop was requested. Exit code 0 is no success then: many scripts save at SIGTERM and exit with 0.
    if end.stop.is_requested:
        return stopped(end.running, end.stop.reason or "stopped on request", now=end.time)
    if end.exit_code == 0:
        return succeeded(end.running, now=end.time)
    # The first failure that torchrun recorded, or that the output shows.
    explained = explain_failures(end.failures, end.output_tail, rank_of=lambda failure: _global_rank(end, failure))
    failure = find_first_failure(explained)
    if failure is None:
        failure = parse_failure_report(end.output_tail, code=end.exit_code, time=end.time)
    # Without an exception, the last line of the output has to explain it.
    if failure.error_type == "RankExited":
        last_line = find_last_line(end.output_tail, rank=_global_rank(end, failure))
        message = f"exited with code {failure.exit_code}; its last line: {last_line}"
        failure = replace(failure, message=message, stack=end.output_tail)
    return rank_failed(end, failure)


def _global_rank(end: NodeEnd, failure: RankFailure) -> int | None:
    return None if failure.local_rank is None else end.node.global_rank(failure.local_rank)


def succeeded(running: TerminationMessage, *, now: float) -> TerminationMessage:
    """Return the final message of a node that succeeded."""
    return replace(running, final=True, outcome=contract.SUCCEEDED, phase=contract.DONE, time=now)


def stopped(running: TerminationMessage, reason: str, *, now: float) -> TerminationMessage:
    """Return the final message of a node that was stopped on request."""
    return replace(running, final=True, outcome=contract.STOPPED, message=reason, time=now)


def failed(running: TerminationMessage, error_type: str, message: str, *, now: float) -> TerminationMessage:
    """Return the final message of a node that failed although none of its ranks did."""
    return replace(running, final=True, outcome=contract.FAILED, error_type=error_type, message=message, time=now)


def rank_failed(end: NodeEnd, failure: RankFailure) -> TerminationMessage:
    """Return the final message of a node on which this failure was the first one."""
    return replace(
        failed(end.running, failure.error_type, failure.message, now=failure.time),
        rank=_global_rank(end, failure),
        local_rank=failure.local_rank,
        stack=failure.stack[-_MAX_STACK_CHARACTERS:],
        exit_code=failure.exit_code,
        signal=failure.signal,
        victim=failure.victim,
    )


def container_exit_code(final: TerminationMessage) -> int:
    """Return the exit code of the container; EXIT_PERMANENT for errors that a restart cannot fix."""
    if final.outcome == contract.SUCCEEDED:
        return EXIT_SUCCEEDED
    if final.outcome == contract.STOPPED:
        return EXIT_STOPPED
    return EXIT_PERMANENT if final.error_type in contract.USER_ERRORS else EXIT_RETRYABLE
