"""Summarise a finished run in a few facts, with which its report and its model card open."""

from dataclasses import dataclass

from finetune_supervisor.messages import Degradation
from finetune_trainer.report.attempt_history import AttemptHistory, RankTime
from finetune_trainer.units import GIB, format_duration

_SECONDS_PER_HOUR = 3600


@dataclass(frozen=True)
class RunSummary:
    """How a run ended, and what it used."""

    outcome: str
    batch: str  # effective batch and its factors
    best_evaluation: str | None  # None without an evaluation
    peak_bytes: int | None  # highest peak memory of a rank; None if this attempt trained no step
    forecast_bytes: int | None  # forecast peak memory of a rank
    on_gpu: bool
    history: AttemptHistory | None  # None if the output folder has no record
    degraded: tuple[Degradation, ...] = ()  # of the last attempt

    @property
    def hours_unit(self) -> str:
        """GPU-hours, or rank-hours without GPUs."""
        return "GPU-hours" if self.on_gpu else "rank-hours"

    def list_facts(self) -> dict[str, str]:
        """Return the facts by their names."""
        facts = {"Outcome": self.outcome}
        if self.history:
            facts["Time"] = format_duration(self.history.finished_at - self.history.started_at)
        facts["Effective batch"] = self.batch
        facts["Best evaluation"] = self.best_evaluation or "no evaluation"
        if self.history:
            facts["Restarts"] = str(self.history.restarts)
        facts["Peak memory of a rank"] = self._describe_memory()
        if self.history:
            facts[self.hours_unit] = describe_hours(self.history.time)
        facts |= {each.reason: each.message for each in self.degraded}
        return facts

    def _describe_memory(self) -> str:
        if self.peak_bytes is None:
            return "not measured, because the last attempt trained no step"
        peak = f"{self.peak_bytes / GIB:.2f} GiB"
        if not self.forecast_bytes:
            return f"{peak}; no forecast"
        share = self.peak_bytes / self.forecast_bytes
        return f"{peak}, {share:.0%} of the forecast of {self.forecast_bytes / GIB:.2f} GiB"


def describe_hours(time: RankTime) -> str:
    """Return the hours of all ranks and their parts, such as `8.1: 7.5 useful, 0.2 starting, 0.4 lost`."""
    parts = ", ".join(f"{format_hours(seconds)} {name}" for name, seconds in list_parts(time))
    return f"{format_hours(time.total)}: {parts}"


def list_parts(time: RankTime) -> tuple[tuple[str, float], ...]:
    """Return the names of the parts of the time, and their seconds."""
    return (("useful", time.useful), ("starting", time.starting), ("lost", time.lost))


def format_hours(seconds: float) -> str:
    """Format seconds as hours with three significant digits, without an exponent."""
    hours = seconds / _SECONDS_PER_HOUR
    return f"{hours:.0f}" if hours >= 100 else f"{hours:.3g}" if hours >= 0.001 or not hours else "<0.001"
