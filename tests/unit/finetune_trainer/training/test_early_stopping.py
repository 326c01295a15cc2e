"""Early stopping and the choice of the published weights, computed from the log history."""

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

NAN = math.nan


def policy(**training: Any) -> EvaluationPolicy:
    policy = EvaluationPolicy.from_training(Training.model_validate({"evalSteps": 10, **training}))
    assert policy is not None
    return policy


def log_of(*values: float, metric: str = "eval_loss") -> list[dict[str, float]]:
    """A log history with an evaluation every ten steps, among entries of training."""
    return [
        entry
        for number, value in enumerate(values, start=1)
        for entry in ({"loss": 1.0, "step": 10 * number}, {metric: value, "step": 10 * number})
    ]


def save_checkpoints(output: OutputFolder, steps: Iterable[int]) -> Checkpoints:
    checkpoints = Checkpoints(output, keep_last=9)
    for step in steps:
        checkpoints.save(step, 2, lambda folder: (folder / "weights").touch())
    return checkpoints


def test_without_a_field_that_compares_evaluations_there_is_no_policy() -> None:
    assert EvaluationPolicy.from_training(Training(eval_steps=10)) is None


@pytest.mark.parametrize(
    ("values", "status"),
    [
        pytest.param((), EvaluationStatus(None, 0), id="no evaluation"),
        pytest.param((3.0, 2.0, 1.0), EvaluationStatus(Evaluation(30, 1.0), 0), id="each one better"),
        pytest.param((2.0, 3.0, 2.5), EvaluationStatus(Evaluation(10, 2.0), 2), id="none better than the first"),
        pytest.param((2.0, 2.0), EvaluationStatus(Evaluation(10, 2.0), 1), id="an equal value is not better"),
        pytest.param((2.0, 3.0, 1.0), EvaluationStatus(Evaluation(30, 1.0), 0), id="worse, then better"),
        pytest.param((NAN, 3.0, NAN), EvaluationStatus(Evaluation(20, 3.0), 1), id="NaN is never better"),
        pytest.param((NAN, NAN), EvaluationStatus(None, 2), id="only NaN"),
    ],
)
def test_the_best_evaluation_has_the_lowest_loss(values: tuple[float, ...], status: EvaluationStatus) -> None:
    assert policy(earlyStoppingPatience=2).compute_status(log_of(*values)) == status


def test_a_metric_that_is_not_a_loss_is_better_when_higher() -> None:
    accuracy_policy = policy(loadBestModelAtEnd=True, metricForBestModel="eval_rewards/accuracies")
    log = log_of(0.5, 0.7, 0.6, metric="eval_rewards/accuracies")

    assert accuracy_policy.compute_status(log) == EvaluationStatus(Evaluation(20, 0.7), 1)
    assert [evaluation.step for evaluation in accuracy_policy.rank_evaluations(log)] == [20, 30, 10]


def test_an_improvement_below_the_threshold_is_the_best_but_counts_as_no_improvement() -> None:
    strict = policy(earlyStoppingPatience=2, earlyStoppingThreshold=0.1)
    log = log_of(2.0, 1.95, 1.9)

    assert strict.compute_status(log) == EvaluationStatus(Evaluation(30, 1.9), 2)
    assert strict.stops_early(log)
    assert not strict.stops_early(log_of(2.0, 1.95, 1.8))


def test_training_stops_after_the_configured_number_of_evaluations_without_improvement() -> None:
    three = policy(earlyStoppingPatience=3)

    assert not three.stops_early(log_of(1.0, 2.0, 2.0))
    assert three.stops_early(log_of(1.0, 2.0, 2.0, 2.0))
    assert not policy(loadBestModelAtEnd=True).stops_early(log_of(1.0, *[2.0] * 50))


def test_a_log_history_read_from_a_checkpoint_gives_the_same_status() -> None:
    log = log_of(2.0000000000000004, 2.0, 1.9999999999999998, 2.1)

    restored = json.loads(json.dumps(log))

    status = policy(earlyStoppingPatience=1).compute_status(restored)
    assert status == EvaluationStatus(Evaluation(30, 1.9999999999999998), 1)


def outcome_of(
    output: OutputFolder, *values: float, saved: Iterable[int] = (), last_step: int = 30, **training: Any
) -> TrainingOutcome:
    checkpoints = save_checkpoints(output, saved)
    return determine_outcome(policy(**training), log_of(*values), checkpoints, last_step=last_step, total_steps=300)


def test_the_message_names_the_step_of_an_early_stop_and_of_the_published_weights(output: OutputFolder) -> None:
    outcome = outcome_of(output, 1.5, 1.6, 1.7, saved=(10, 30), earlyStoppingPatience=2, loadBestModelAtEnd=True)

    assert outcome == TrainingOutcome(
        "stopped early at step 30 of 300: 2 evaluations without a better eval_loss; the weights are those of step 10,"
        " the best of 3 evaluations (eval_loss 1.5)",
        stopped_early=True,
        checkpoint=output.checkpoints / "step-00000010",
    )


def test_without_load_best_the_last_weights_are_published(output: OutputFolder) -> None:
    outcome = outcome_of(output, 1.5, 1.6, 1.7, earlyStoppingPatience=1, earlyStoppingThreshold=0.5)

    assert outcome.message == (
        "stopped early at step 30 of 300: 1 evaluation without a better eval_loss by more than 0.5; the weights are"
        " those of the last step, 30"
    )
    assert outcome.checkpoint is None


def test_a_run_that_made_all_steps_did_not_stop_early(output: OutputFolder) -> None:
    outcome = outcome_of(output, 1.5, 1.6, saved=(10,), last_step=300, loadBestModelAtEnd=True)

    assert not outcome.stopped_early
    assert outcome.message == "the weights are those of step 10, the best of 2 evaluations (eval_loss 1.5)"


def test_no_checkpoint_is_read_if_the_last_step_was_the_best(output: OutputFolder) -> None:
    assert outcome_of(output, 1.7, 1.6, 1.5, saved=(30,), loadBestModelAtEnd=True).checkpoint is None


def test_if_the_best_checkpoint_is_damaged_the_next_best_is_published_and_reported(output: OutputFolder) -> None:
    save_checkpoints(output, (10, 20))
    (output.checkpoints / "step-00000010" / "manifest.json").unlink()

    outcome = outcome_of(output, 1.5, 1.6, 1.7, loadBestModelAtEnd=True)

    assert outcome.checkpoint == output.checkpoints / "step-00000020"
    assert "step 20, the best of 3 evaluations with a complete checkpoint (eval_loss 1.6)" in outcome.message
    assert outcome.skipped == ("step-00000010: manifest.json is missing",)


def test_if_every_evaluation_is_nan_the_last_weights_are_published(output: OutputFolder) -> None:
    outcome = outcome_of(output, NAN, NAN, last_step=300, loadBestModelAtEnd=True)

    assert outcome.message == (
        "no evaluation returned a finite eval_loss, so the weights are those of the last step, 300"
    )
