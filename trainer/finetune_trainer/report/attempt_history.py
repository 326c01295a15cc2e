"""Derive from the logged attempts of a job what ended each of them, and which GPU time was useful."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from finetune_api.termination import Termination
from finetune_supervisor.error_text import MAX_LINE_CHARACTERS, select_line
from finetune_trainer.report.attempt_log import AttemptEntry, LoggedAttempt


@dataclass(frozen=True)
class RankTime:
    """Seconds of all ranks by their use; with GPUs, a rank uses one GPU."""

    useful: float = 0.0  # steps that the result contains
    starting: float = 0.0  # until the end of the first step of an attempt
    lost: float = 0.0  # steps that a later attempt repeated, and the time after the last step of a failed attempt

    @property
    def total(self) -> float:
        """The sum of all three parts."""
        return self.useful + self.starting + self.lost

    def __add__(self, other: "RankTime") -> "RankTime":
        return RankTime(self.useful + other.useful, self.starting + other.starting, self.lost + other.lost)


@dataclass(frozen=True)
class AttemptEnding:
    """Why an attempt ended, by the final messages of its nodes."""

    cause: str  # node, rank and type of the error, or stopped
    message: str = ""  # the line of the message that the status shows; secrets are redacted by the supervisor


@dataclass(frozen=True)
class PastAttempt:
    """An attempt with the steps that it trained, its end and the settings that the next attempt changed."""

    attempt: int
    first_step: int
    last_step: int
    duration_seconds: float
    time: RankTime
    ending: AttemptEnding | None  # None for the attempt that published the result
    changed_settings: Mapping[str, str]  # settings that differ from the previous attempt


@dataclass(frozen=True)
class AttemptHistory:
    """All recorded attempts of a job up to the publication of its result."""

    started_at: float
    finished_at: float
    restarts: int  # includes attempts without a record, which ended before rank 0 claimed the output
    attempts: tuple[PastAttempt, ...]

    @property
    def time(self) -> RankTime:
        """The time of all recorded attempts."""
        return sum((attempt.time for attempt in self.attempts), RankTime())


def build_history(logged: Sequence[LoggedAttempt], *, now: float) -> AttemptHistory | None:
    """Build the history; None without a record. The last attempt is the running one, which ends now."""
    if not logged:
        return None
    attempts = []
    for index, current in enumerate(logged):
        following = logged[index + 1] if index + 1 < len(logged) else None
        ended_at = _find_end(current, following, now=now)
        settings = logged[index - 1].entry.settings if index else current.entry.settings
        attempts.append(
            PastAttempt(
                attempt=current.entry.attempt,
                first_step=current.entry.first_step,
                last_step=max(current.entry.step, current.entry.first_step),
                duration_seconds=ended_at - current.entry.started_at,
                time=_divide_time(
                    current.entry,
                    retained_step=_find_retained_step(current, logged[index + 1 :]),
                    ended_at=ended_at,
                    training_ended_at=current.entry.updated_at if following else now,
                ),
                ending=explain_ending(current.failures) if following else None,
                changed_settings={
                    name: f"{settings[name]} → {value}"
                    for name, value in current.entry.settings.items()
                    if name in settings and settings[name] != value
                },
            )
        )
    return AttemptHistory(logged[0].entry.started_at, now, logged[-1].entry.attempt, tuple(attempts))


def explain_ending(failures: Sequence[Termination]) -> AttemptEnding:
    """Return the cause that the nodes report: the first failure of a node that is no victim of a peer."""
    if not failures:
        return AttemptEnding("no final message: the pods were killed or their Kubernetes node was lost")
    first = min(failures, key=lambda message: (message.outcome != "failed", message.victim, message.time or 0.0))
    message = " ".join(select_line(first.message).split())[:MAX_LINE_CHARACTERS]
    if first.outcome != "failed":
        return AttemptEnding("stopped on request", message)
    rank = "" if first.rank is None else f", rank {first.rank}"
    return AttemptEnding(f"node {first.node_rank}{rank}: {first.error_type or 'unknown error'}", message)


def _find_end(current: LoggedAttempt, following: LoggedAttempt | None, *, now: float) -> float:
    """Return when the attempt ended: with the last output of its nodes, and before the next attempt started."""
    if following is None:
        return now
    last_sign = max(current.entry.updated_at, current.last_output_at)
    return max(current.entry.started_at, min(last_sign, following.entry.started_at))


def _find_retained_step(current: LoggedAttempt, later: Sequence[LoggedAttempt]) -> int:
    """Return the last step of the attempt that no later attempt repeated; only attempts that trained repeat steps."""
    resumed_from = (each.entry.first_step for each in later if each.entry.training_at is not None)
    return min((current.entry.step, *resumed_from))


def _divide_time(entry: AttemptEntry, *, retained_step: int, ended_at: float, training_ended_at: float) -> RankTime:
    """Divide the time of an attempt; the steps of an attempt count as equally long."""
    total = max(ended_at - entry.started_at, 0.0)
    if entry.training_at is None or entry.step <= entry.first_step:
        return RankTime(starting=total * entry.ranks)
    starting = min(max(entry.training_at - entry.started_at, 0.0), total)
    training = min(max(training_ended_at - entry.training_at, 0.0), total - starting)
    retained_share = max(retained_step - entry.first_step, 0) / (entry.step - entry.first_step)
    useful = training * retained_share
    lost = max(total - starting - useful, 0.0)
    return RankTime(useful=useful * entry.ranks, starting=starting * entry.ranks, lost=lost * entry.ranks)
