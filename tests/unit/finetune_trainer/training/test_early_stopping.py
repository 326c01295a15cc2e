"""Test early stopping and the selection of the weights to publish."""

import json
import math
from collections.abc import Iterable
from typing import Any

import pytest

from finetune_api.v1alpha1.training import Training
from finetune_trainer.checkpoint.checkpoints import Checkpoints
from finetune_trainer.checkpoint.output_folder import OutputFolder
from finetune_trainer.training.early_stopping import (
    Evaluation,
    EvaluationPolicy,
    EvaluationStatus,
    TrainingOutcome,
    determine_outcome,
)
from testing.builders.checkpoint import write_checkpoint

pytestmark = pytest.mark.usefixtures("process_group")

NAN = math.nan


def build_policy(**training: Any) -> EvaluationPolicy:
    policy = EvaluationPolicy.from_training(Training.model_validate({"evalSteps": 10, **training}))
    assert policy is not None
    return policy


def build_log(*values: float, metric: str = "eval_loss") -> list[dict[str, float]]:
    """Return a log history with an evaluation every ten steps, and with training entries."""
    return [
        entry
        for number, value in enumerate(values, start=1)
        for entry in ({"loss": 1.0, "step": 10 * number}, {metric: value, "step": 10 * number})
    ]


def save_checkpoints(output: OutputFolder, steps: Iterable[int]) -> Checkpoints:
    checkpoints = Checkpoints(output, keep_last=9)
    for step in steps:
        write_checkpoint(checkpoints, step)
    return checkpoints


def test_policy_requires_early_stopping_or_load_best_model_at_end() -> None:
    assert EvaluationPolicy.from_training(Training(eval_steps=10)) is None


@pytest.mark.parametrize(
    ("values", "status"),
    [
        pytest.param((), EvaluationStatus(None, 0), id="no evaluation"),
        pytest.param((3.0, 2.0, 1.0), EvaluationStatus(Evaluation(30, 1.0), 0), id="every value better"),
        pytest.param((2.0, 3.0, 2.5), EvaluationStatus(Evaluation(10, 2.0), 2), id="none better than the first"),
        pytest.param((2.0, 2.0), EvaluationStatus(Evaluation(10, 2.0), 1), id="an equal value is not better"),
        pytest.param((2.0, 3.0, 1.0), EvaluationStatus(Evaluation(30, 1.0), 0), id="worse, then better"),
        pytest.param((NAN, 3.0, NAN), EvaluationStatus(Evaluation(20, 3.0), 1), id="NaN is never better"),
        pytest.param((NAN, NAN), EvaluationStatus(None, 2), id="only NaN"),
    ],
)
def test_the_best_evaluation_has_the_lowest_loss(values: tuple[float, ...], status: EvaluationStatus) -> None:
    assert build_policy(earlyStoppingPatience=2).compute_status(build_log(*values)) == status


def test_higher_accuracy_is_better() -> None:
    accuracy_policy = build_policy(loadBestModelAtEnd=True, metricForBestModel="eval_rewards/accuracies")
    log = build_log(0.5, 0.7, 0.6, metric="eval_rewards/accuracies")

    assert accuracy_policy.compute_status(log) == EvaluationStatus(Evaluation(20, 0.7), 1)
    assert [evaluation.step for evaluation in accuracy_policy.rank_evaluations(log)] == [20, 30, 10]


def test_improvement_below_the_threshold_does_not_count() -> None:
    strict_policy = build_policy(earlyStoppingPatience=2, earlyStoppingThreshold=0.1)
    log = build_log(2.0, 1.95, 1.9)

    assert strict_policy.compute_status(log) == EvaluationStatus(Evaluation(30, 1.9), 2)
    assert strict_policy.should_stop_early(log)
    assert not strict_policy.should_stop_early(build_log(2.0, 1.95, 1.8))


def test_training_stops_after_three_evaluations_without_improvement() -> None:
    policy = build_policy(earlyStoppingPatience=3)

    assert not policy.should_stop_early(build_log(1.0, 2.0, 2.0))
    assert policy.should_stop_early(build_log(1.0, 2.0, 2.0, 2.0))
    assert not build_policy(loadBestModelAtEnd=True).should_stop_early(build_log(1.0, *[2.0] * 50))


def test_evaluation_status_is_unchanged_after_saving_and_loading_the_log_history() -> None:
    log = build_log(2.0000000000000004, 2.0, 1.9999999999999998, 2.1)

    restored_log = json.loads(json.dumps(log))

    status = build_policy(earlyStoppingPatience=1).compute_status(restored_log)
    assert status == EvaluationStatus(Evaluation(30, 1.9999999999999998), 1)


def compute_outcome(
    output: OutputFolder, *values: float, saved_steps: Iterable[int] = (), last_step: int = 30, **training: Any
) -> TrainingOutcome:
    checkpoints = save_checkpoints(output, saved_steps)
    return determine_outcome(
        build_policy(**training), build_log(*values), checkpoints, last_step=last_step, total_steps=300
    )


def test_outcome_message_contains_the_last_step_and_the_published_step(output: OutputFolder) -> None:
    outcome = compute_outcome(
        output, 1.5, 1.6, 1.7, saved_steps=(10, 30), earlyStoppingPatience=2, loadBestModelAtEnd=True
    )

    assert outcome == TrainingOutcome(
        "stopped early at step 30 of 300: 2 evaluations without a better eval_loss; the weights are those of step 10,"
        " the best of 3 evaluations (eval_loss 1.5)",
        stopped_early=True,
        checkpoint=output.checkpoints / "step-00000010",
    )


def test_last_weights_are_published_without_load_best_model_at_end(output: OutputFolder) -> None:
    outcome = compute_outcome(output, 1.5, 1.6, 1.7, earlyStoppingPatience=1, earlyStoppingThreshold=0.5)

    assert outcome.message == (
        "stopped early at step 30 of 300: 1 evaluation without a better eval_loss by more than 0.5; the weights are"
        " those of the last step, 30"
    )
    assert outcome.checkpoint is None


def test_completed_run_is_not_reported_as_stopped_early(output: OutputFolder) -> None:
    outcome = compute_outcome(output, 1.5, 1.6, saved_steps=(10,), last_step=300, loadBestModelAtEnd=True)

    assert not outcome.stopped_early
    assert outcome.message == "the weights are those of step 10, the best of 2 evaluations (eval_loss 1.5)"


def test_no_checkpoint_is_read_if_the_last_step_is_the_best(output: OutputFolder) -> None:
    assert compute_outcome(output, 1.7, 1.6, 1.5, saved_steps=(), loadBestModelAtEnd=True).checkpoint is None


def test_next_best_weights_are_published_if_the_best_checkpoint_is_damaged(output: OutputFolder) -> None:
    save_checkpoints(output, (10, 20))
    (output.checkpoints / "step-00000010" / "manifest.json").unlink()

    outcome = compute_outcome(output, 1.5, 1.6, 1.7, loadBestModelAtEnd=True)

    assert outcome.checkpoint == output.checkpoints / "step-00000020"
    assert "step 20, the best of 3 evaluations with a complete checkpoint (eval_loss 1.6)" in outcome.message
    assert outcome.skipped_checkpoints == ("step-00000010: manifest.json is missing",)


def test_last_weights_are_published_if_every_evaluation_is_nan(output: OutputFolder) -> None:
    outcome = compute_outcome(output, NAN, NAN, last_step=300, loadBestModelAtEnd=True)

    assert outcome.message == (
        "no evaluation returned a finite eval_loss, so the weights are those of the last step, 300"
    )
