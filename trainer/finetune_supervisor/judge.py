"""Derives the final termination message and exit code of a finished node from its observed state, without I/O."""

from __future__ import annotations

from dataclasses import dataclass, replace

from finetune_supervisor import contract
from finetune_supervisor.contract import Node
from finetune_supervisor.failures.rank_failures import Failures, RankFailure, find_first_failure, find_worker_signal
from finetune_supervisor.failures.traceback_parser import explain_failures, find_last_line, parse_failure_report
from finetune_supervisor.messages import TerminationMessage
from finetune_supervisor.stop_request import StopRequest

EXIT_SUCCEEDED, EXIT_RETRYABLE, EXIT_PERMANENT, EXIT_STOPPED = 0, 1, 2, 143
_MAX_STACK_CHARACTERS = 3000


@dataclass(frozen=True)
class FinishedNode:
    """Observed state of a node after its program has ended."""

    node: Node
    running_message: TerminationMessage  # last message before the program ended
    exit_code: int  # exit code of the program; negative for a signal
    time: float  # seconds since the epoch
    stop_request: StopRequest
    is_command: bool = False  # whether the program is a user command
    is_published: bool = False  # whether the result is complete
    hang: RankFailure | None = None
    phases: frozenset[str] = frozenset()  # last reported phases of the ranks
    failures: Failures = ()  # failures of the ranks or of the launcher
    output_tail: str = ""


def judge(finished_node: FinishedNode) -> TerminationMessage:
    """Return the final termination message of a node whose program has ended."""
    # A hang after publication counts as a success, because some libraries hang on shutdown.
    if finished_node.hang is not None:
        return (
            build_success_message(finished_node.running_message, now=finished_node.time)
            if finished_node.is_published
            else build_rank_failure_message(finished_node, finished_node.hang)
        )
    return _judge_command(finished_node) if finished_node.is_command else _judge_trainer(finished_node)


def _judge_trainer(finished_node: FinishedNode) -> TerminationMessage:
    running_message, now = finished_node.running_message, finished_node.time
    # The node succeeded if all ranks finished or the result is complete.
    if (finished_node.exit_code == 0 and finished_node.phases == {contract.DONE}) or finished_node.is_published:
        return build_success_message(running_message, now=now)
    # The node was stopped if its ranks saved a checkpoint or were terminated without one.
    if finished_node.phases == {contract.STOPPED}:
        return build_stop_message(running_message, "stopped on request; a checkpoint was saved", now=now)
    if finished_node.stop_request.reason:
        return build_stop_message(running_message, finished_node.stop_request.reason, now=now)
    # A rank failed. After a stop request, victims do not count, because they failed only when their peers were stopped.
    failure = find_first_failure(finished_node.failures)
    if finished_node.stop_request.is_requested and (failure is None or failure.victim):
        reason = "stopped, but other nodes ended before a checkpoint was saved"
        return build_stop_message(running_message, reason, now=now)
    if failure is not None:
        return build_rank_failure_message(finished_node, failure)
    # The cause of the failure is unknown.
    if finished_node.exit_code == 0:
        message = "the ranks ended without an error and without a result"
        return build_failure_message(running_message, "RankExited", message, now=now)
    ending = (
        f"ended by signal {-finished_node.exit_code}"
        if finished_node.exit_code < 0
        else f"exited with code {finished_node.exit_code}"
    )
    message = f"the launcher {ending}; the end of its output:\n{finished_node.output_tail}"
    return build_failure_message(running_message, "LauncherFailed", message, now=now)


def _judge_command(finished_node: FinishedNode) -> TerminationMessage:
    running_message, now = finished_node.running_message, finished_node.time
    # After a stop request, exit code 0 is not a success, because many scripts save at SIGTERM and exit with 0.
    if finished_node.stop_request.is_requested:
        return build_stop_message(running_message, finished_node.stop_request.reason or "stopped on request", now=now)
    if finished_node.exit_code == 0:
        return build_success_message(running_message, now=now)
    # Use the first failure that torchrun recorded, or else parse the output.
    explained = explain_failures(
        finished_node.failures,
        finished_node.output_tail,
        find_rank=lambda failure: _find_global_rank(finished_node, failure),
    )
    failure = find_first_failure(explained)
    if failure is None:
        failure = parse_failure_report(finished_node.output_tail, code=finished_node.exit_code, time=finished_node.time)
    # Without an exception, report the last line of the output.
    if failure.error_type == "RankExited":
        last_line = find_last_line(finished_node.output_tail, rank=_find_global_rank(finished_node, failure))
        message = f"exited with code {failure.exit_code}; its last line: {last_line}"
        failure = replace(failure, message=message, stack=finished_node.output_tail)
    return build_rank_failure_message(finished_node, failure)


def _find_global_rank(finished_node: FinishedNode, failure: RankFailure) -> int | None:
    return None if failure.local_rank is None else finished_node.node.to_global_rank(failure.local_rank)


def build_success_message(running_message: TerminationMessage, *, now: float) -> TerminationMessage:
    """Build the final termination message of a node that succeeded."""
    return replace(running_message, final=True, outcome=contract.SUCCEEDED, phase=contract.DONE, time=now)


def build_stop_message(running_message: TerminationMessage, reason: str, *, now: float) -> TerminationMessage:
    """Build the final termination message of a node that was stopped on request."""
    return replace(running_message, final=True, outcome=contract.STOPPED, message=reason, time=now)


def build_failure_message(
    running_message: TerminationMessage, error_type: str, message: str, *, now: float
) -> TerminationMessage:
    """Build the final termination message for a failure that no rank reported."""
    return replace(
        running_message, final=True, outcome=contract.FAILED, error_type=error_type, message=message, time=now
    )


def build_rank_failure_message(finished_node: FinishedNode, failure: RankFailure) -> TerminationMessage:
    """Build the final termination message of a node whose first failure is `failure`."""
    message = find_worker_signal(failure.message, f"{failure.stack}\n{finished_node.output_tail}")
    return replace(
        build_failure_message(finished_node.running_message, failure.error_type, message, now=failure.time),
        rank=_find_global_rank(finished_node, failure),
        local_rank=failure.local_rank,
        stack=failure.stack[-_MAX_STACK_CHARACTERS:],
        exit_code=failure.exit_code,
        signal=failure.signal,
        victim=failure.victim,
    )


def get_container_exit_code(final_message: TerminationMessage) -> int:
    """Return the exit code of the container, EXIT_PERMANENT for errors that a restart cannot fix."""
    if final_message.outcome == contract.SUCCEEDED:
        return EXIT_SUCCEEDED
    if final_message.outcome == contract.STOPPED:
        return EXIT_STOPPED
    return EXIT_PERMANENT if final_message.error_type in contract.USER_ERRORS else EXIT_RETRYABLE
