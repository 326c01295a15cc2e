"""Which evaluation was the best, and whether too many brought nothing better: both follow from the log alone.

The log is the same on every rank and part of every checkpoint, so all ranks come to the same end, and a resumed run
goes on counting.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from finetune_api.v1alpha1.training import EVAL_LOSS, Training
from finetune_trainer.checkpoint.checkpoints import Checkpoints

Log = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Evaluation:
    """What was measured after a step."""

    step: int
    value: float


@dataclass(frozen=True)
class Standing:
    """Where a run stands after its last evaluation."""

    best: Evaluation | None  # None: none gave a number
    waited: int  # evaluations since the last that was better by more than the threshold


@dataclass(frozen=True)
class Comparison:
    """How evaluations are compared, and what for."""

    metric: str
    patience: int | None
    threshold: float
    publishes_best: bool

    @classmethod
    def of(cls, training: Training) -> Self | None:
        if not training.compares_evaluations:
            return None
        return cls(
            training.metric_for_best_model or EVAL_LOSS,
            training.early_stopping_patience,
            training.early_stopping_threshold or 0.0,
            training.load_best_model_at_end,
        )

    def standing(self, log: Log) -> Standing:
        best, waited = None, 0
        for each in self._evaluations(log):
            gain = self._gain(each, best)
            waited = 0 if gain > self.threshold else waited + 1
            best = each if gain > 0 else best
        return Standing(best, waited)

    def best_step(self, log: Log) -> int | None:
        """Whose weights would be published, if it is not simply the last."""
        best = self.standing(log).best
        return best.step if best and self.publishes_best else None

    def is_out_of_patience(self, log: Log) -> bool:
        return self.patience is not None and self.standing(log).waited >= self.patience

    def ranked(self, log: Log) -> list[Evaluation]:
        """The best first; of equals the first. Those that gave no number are left out."""
        counted = (each for each in self._evaluations(log) if math.isfinite(each.value))
        return sorted(counted, key=lambda each: self._sign * each.value)

    @property
    def _sign(self) -> int:
        """As transformers derives greater_is_better: of what is no loss, more is better."""
        return 1 if self.metric.endswith("loss") else -1

    def _gain(self, each: Evaluation, best: Evaluation | None) -> float:
        if not math.isfinite(each.value):
            return -math.inf
        return math.inf if best is None else self._sign * (best.value - each.value)

    def _evaluations(self, log: Log) -> list[Evaluation]:
        return [Evaluation(entry["step"], entry[self.metric]) for entry in log if self.metric in entry]


@dataclass(frozen=True)
class Ending:
    """How training ended, and whose weights are published."""

    words: str
    stopped_early: bool = False
    checkpoint: Path | None = None  # None: the weights that the ranks hold
    passed_over: tuple[str, ...] = ()


def conclude(comparison: Comparison, log: Log, checkpoints: Checkpoints, *, last_step: int, total_steps: int) -> Ending:
    """On rank 0, which reads the checkpoints."""
    stopped_early = last_step < total_steps
    words = (
        f"stopped early at step {last_step} of {total_steps}: {describe_wait(comparison)}; " if stopped_early else ""
    )
    ranked = comparison.ranked(log) if comparison.publishes_best else []
    if not ranked:
        why = f"no evaluation gave a number for {comparison.metric}, so " if comparison.publishes_best else ""
        return Ending(f"{words}{why}the weights are those of the last step, {last_step}", stopped_early)
    found = checkpoints.first_whole(each.step for each in ranked)
    best = next(each for each in ranked if each.step == found.step)
    whole = " with a whole checkpoint" if found.passed_over else ""
    words += (
        f"the weights are those of step {best.step}, the best of {count(len(ranked))}{whole}"
        f" ({comparison.metric} {best.value:.4g})"
    )
    checkpoint = None if best.step == last_step else found.path
    return Ending(words, stopped_early, checkpoint, found.passed_over)


def describe_wait(comparison: Comparison) -> str:
    """What ends the patience."""
    by = f" by more than {comparison.threshold:g}" if comparison.threshold else ""
    return f"{count(comparison.patience or 0)} without a better {comparison.metric}{by}"


def count(evaluations: int) -> str:
    return f"{evaluations} evaluation{'s' if evaluations != 1 else ''}"
