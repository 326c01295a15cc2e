"""Early stopping and selection of the best evaluation, both computed from the log history.

The log history is identical on all ranks and saved in every checkpoint. Therefore all ranks make the same decision, and
a resumed run continues to count evaluations without improvement.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from finetune_api.v1alpha1.training import EVAL_LOSS, Training
from finetune_trainer.checkpoint.checkpoints import Checkpoints, ResumePoint
from finetune_trainer.distributed.heartbeat_writer import HeartbeatWriter

LogHistory = Sequence[Mapping[str, Any]]  # TrainerState.log_history of transformers


@dataclass(frozen=True)
class Evaluation:
    """The value of the compared metric after a step."""

    step: int
    value: float


@dataclass(frozen=True)
class EvaluationStatus:
    """The best evaluation so far, and the number of evaluations without improvement."""

    best_evaluation: Evaluation | None  # None: no evaluation has returned a finite value yet
    evaluations_without_improvement: int  # counted since the last improvement that exceeds the threshold


@dataclass(frozen=True)
class EvaluationPolicy:
    """Rules for comparing evaluations, stopping early and publishing the best weights."""

    metric: str
    early_stopping_patience: int | None
    threshold: float
    publishes_best_weights: bool

    @classmethod
    def from_training(cls, training: Training) -> Self | None:
        """Build the policy from spec.training; return None if no evaluation affects the result."""
        if not training.tracks_best_evaluation:
            return None
        return cls(
            training.metric_for_best_model or EVAL_LOSS,
            training.early_stopping_patience,
            training.early_stopping_threshold or 0.0,
            training.load_best_model_at_end,
        )

    def compute_status(self, log_history: LogHistory) -> EvaluationStatus:
        """Return the best evaluation in the log history and the number of evaluations without improvement."""
        best, without_improvement = None, 0
        for evaluation in self._parse_evaluations(log_history):
            improvement = self._compute_improvement(evaluation, best)
            without_improvement = 0 if improvement > self.threshold else without_improvement + 1
            best = evaluation if improvement > 0 else best
        return EvaluationStatus(best, without_improvement)

    def find_best_step(self, log_history: LogHistory) -> int | None:
        """Return the step of the best weights, or None if the last weights are published."""
        best = self.compute_status(log_history).best_evaluation
        return best.step if best and self.publishes_best_weights else None

    def should_stop_early(self, log_history: LogHistory) -> bool:
        """Return whether the number of evaluations without improvement has reached its limit."""
        limit = self.early_stopping_patience
        return limit is not None and self.compute_status(log_history).evaluations_without_improvement >= limit

    def rank_evaluations(self, log_history: LogHistory) -> list[Evaluation]:
        """Return the evaluations with a finite value, best first; equal values keep their order."""
        finite_evaluations = (
            evaluation for evaluation in self._parse_evaluations(log_history) if math.isfinite(evaluation.value)
        )
        return sorted(finite_evaluations, key=lambda evaluation: self._sign * evaluation.value)

    @property
    def _sign(self) -> int:
        """1 if lower values of the metric are better, otherwise -1; transformers uses the same rule."""
        return 1 if self.metric.endswith("loss") else -1

    def _compute_improvement(self, evaluation: Evaluation, best: Evaluation | None) -> float:
        if not math.isfinite(evaluation.value):
            return -math.inf
        return math.inf if best is None else self._sign * (best.value - evaluation.value)

    def _parse_evaluations(self, log_history: LogHistory) -> list[Evaluation]:
        return [Evaluation(entry["step"], entry[self.metric]) for entry in log_history if self.metric in entry]


class BestEvaluationCallback(TrainerCallback):  # type: ignore[misc]
    """Saves a checkpoint at each new best evaluation and stops early, like EarlyStoppingCallback of transformers.

    Early stopping also saves a checkpoint, so that a later attempt does not continue training.
    """

    def __init__(self, policy: EvaluationPolicy, heartbeat: HeartbeatWriter, *, verbose: bool) -> None:
        self._policy = policy
        self._heartbeat = heartbeat
        self._verbose = verbose

    def on_train_begin(self, _args: TrainingArguments, state: TrainerState, _control: TrainerControl, **_: Any) -> None:
        self._report_best(self._policy.compute_status(state.log_history))

    def on_evaluate(self, _args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        status = self._policy.compute_status(state.log_history)
        self._report_best(status)
        if best := status.best_evaluation:
            # transformers saves both fields in trainer_state.json.
            state.best_global_step, state.best_metric = best.step, best.value
            control.should_save |= self._policy.publishes_best_weights and best.step == state.global_step
        if self._policy.should_stop_early(state.log_history):
            control.should_save = control.should_training_stop = True
        if self._verbose:
            print(format_evaluation_line(state, status, self._policy), flush=True)

    def _report_best(self, status: EvaluationStatus) -> None:
        if best := status.best_evaluation:
            progress = replace(self._heartbeat.progress, best_step=best.step, best_metric=best.value)
            self._heartbeat.update_progress(progress)


@dataclass(frozen=True)
class TrainingOutcome:
    """The result of training: how it ended and which weights are published."""

    message: str
    stopped_early: bool = False
    checkpoint: Path | None = None  # checkpoint to publish; None: publish the weights in memory
    skipped_checkpoints: tuple[str, ...] = ()  # damaged checkpoints, each with the reason why it was skipped


def determine_outcome(
    policy: EvaluationPolicy, log_history: LogHistory, checkpoints: Checkpoints, *, last_step: int, total_steps: int
) -> TrainingOutcome:
    """Determine which weights to publish (collective).

    Raises CheckpointCorrupt if the best weights must be published but no checkpoint of an evaluation is intact.
    """
    stopped_early = last_step < total_steps
    message = (
        f"stopped early at step {last_step} of {total_steps}: {describe_stop_criterion(policy)}; "
        if stopped_early
        else ""
    )
    ranking = policy.rank_evaluations(log_history) if policy.publishes_best_weights else []
    if not ranking:
        reason = f"no evaluation returned a finite {policy.metric}, so " if policy.publishes_best_weights else ""
        return TrainingOutcome(f"{message}{reason}the weights are those of the last step, {last_step}", stopped_early)
    best, resume_point = ranking[0], ResumePoint(None)
    if best.step != last_step:  # whose weights are in memory
        resume_point = checkpoints.find_intact(evaluation.step for evaluation in ranking)
        best = next(evaluation for evaluation in ranking if evaluation.step == resume_point.step)
    restriction = " with a complete checkpoint" if resume_point.skipped else ""
    message += (
        f"the weights are those of step {best.step}, the best of {format_evaluation_count(len(ranking))}{restriction}"
        f" ({policy.metric} {best.value:.4g})"
    )
    checkpoint = None if best.step == last_step else resume_point.path
    return TrainingOutcome(message, stopped_early, checkpoint, resume_point.skipped)


def describe_stop_criterion(policy: EvaluationPolicy) -> str:
    """Return the condition for early stopping as text for messages."""
    margin = f" by more than {policy.threshold:g}" if policy.threshold else ""
    return f"{format_evaluation_count(policy.early_stopping_patience or 0)} without a better {policy.metric}{margin}"


def format_evaluation_count(count: int) -> str:
    """Format a number of evaluations, such as `1 evaluation` or `2 evaluations`."""
    return f"{count} evaluation{'s' if count != 1 else ''}"


def format_evaluation_line(state: TrainerState, status: EvaluationStatus, policy: EvaluationPolicy) -> str:
    """Format the log line of one evaluation: step, best value, evaluations without improvement."""
    best, limit = status.best_evaluation, policy.early_stopping_patience
    parts = [
        f"step {state.global_step}/{state.max_steps}",
        f"best {policy.metric} {best.value:.4f} at step {best.step}" if best else f"no {policy.metric} yet",
        f"{status.evaluations_without_improvement} of {limit} evaluations without improvement" if limit else "",
    ]
    return "  ".join(part for part in parts if part)
