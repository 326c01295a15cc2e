"""The best evaluation, patience, and what is said at the end; all of it from the log."""

import json
import math
from collections.abc import Iterable
from typing import Any

import pytest

from finetune_api.v1alpha1.training import Training
from finetune_trainer.checkpoint.checkpoints import Checkpoints
from finetune_trainer.checkpoint.output_folder import Output
from finetune_trainer.training.early_stopping import Comparison, Ending, Evaluation, Standing, conclude

NAN = math.nan


def comparison(**training: Any) -> Comparison:
    found = Comparison.of(Training.model_validate({"evalSteps": 10, **training}))
    assert found is not None
    return found


def log_of(*values: float, metric: str = "eval_loss") -> list[dict[str, float]]:
    """An evaluation every ten steps, among other entries."""
    return [
        entry
        for number, value in enumerate(values, start=1)
        for entry in ({"loss": 1.0, "step": 10 * number}, {metric: value, "step": 10 * number})
    ]


def checkpoints_of(output: Output, steps: Iterable[int]) -> Checkpoints:
    checkpoints = Checkpoints(output, keep=9)
    for step in steps:
        checkpoints.save(step, 2, lambda folder: (folder / "weights").touch())
    return checkpoints


def test_nothing_is_compared_unless_it_is_asked_for() -> None:
    assert Comparison.of(Training(eval_steps=10)) is None


@pytest.mark.parametrize(
    ("values", "standing"),
    [
        pytest.param((), Standing(None, 0), id="none yet"),
        pytest.param((3.0, 2.0, 1.0), Standing(Evaluation(30, 1.0), 0), id="better and better"),
        pytest.param((2.0, 3.0, 2.5), Standing(Evaluation(10, 2.0), 2), id="worse than the first"),
        pytest.param((2.0, 2.0), Standing(Evaluation(10, 2.0), 1), id="as good is not better"),
        pytest.param((2.0, 3.0, 1.0), Standing(Evaluation(30, 1.0), 0), id="better after all"),
        pytest.param((NAN, 3.0, NAN), Standing(Evaluation(20, 3.0), 1), id="no number is never better"),
        pytest.param((NAN, NAN), Standing(None, 2), id="no number at all"),
    ],
)
def test_the_best_is_the_lowest_loss_and_the_wait_is_since_then(values: tuple[float, ...], standing: Standing) -> None:
    assert comparison(earlyStoppingPatience=2).standing(log_of(*values)) == standing


def test_what_is_no_loss_is_better_when_it_is_more() -> None:
    accuracies = comparison(loadBestModelAtEnd=True, metricForBestModel="eval_rewards/accuracies")
    log = log_of(0.5, 0.7, 0.6, metric="eval_rewards/accuracies")

    assert accuracies.standing(log) == Standing(Evaluation(20, 0.7), 1)
    assert [each.step for each in accuracies.ranked(log)] == [20, 30, 10]


def test_a_gain_below_the_threshold_moves_the_best_but_not_the_patience() -> None:
    strict = comparison(earlyStoppingPatience=2, earlyStoppingThreshold=0.1)
    log = log_of(2.0, 1.95, 1.9)

    assert strict.standing(log) == Standing(Evaluation(30, 1.9), 2)
    assert strict.is_out_of_patience(log)
    assert not strict.is_out_of_patience(log_of(2.0, 1.95, 1.8))


def test_patience_ends_after_as_many_evaluations_as_were_asked_for() -> None:
    patient = comparison(earlyStoppingPatience=3)

    assert not patient.is_out_of_patience(log_of(1.0, 2.0, 2.0))
    assert patient.is_out_of_patience(log_of(1.0, 2.0, 2.0, 2.0))
    assert not comparison(loadBestModelAtEnd=True).is_out_of_patience(log_of(1.0, *[2.0] * 50))


def test_a_log_that_went_through_a_checkpoint_tells_the_same() -> None:
    log = log_of(2.0000000000000004, 2.0, 1.9999999999999998, 2.1)

    again = json.loads(json.dumps(log))

    assert comparison(earlyStoppingPatience=1).standing(again) == Standing(Evaluation(30, 1.9999999999999998), 1)


def end(output: Output, *values: float, saved: Iterable[int] = (), last: int = 30, **training: Any) -> Ending:
    checkpoints = checkpoints_of(output, saved)
    return conclude(comparison(**training), log_of(*values), checkpoints, last_step=last, total_steps=300)


def test_a_run_that_stopped_early_says_when_and_whose_weights_it_publishes(output: Output) -> None:
    ended = end(output, 1.5, 1.6, 1.7, saved=(10, 30), earlyStoppingPatience=2, loadBestModelAtEnd=True)

    assert ended == Ending(
        "stopped early at step 30 of 300: 2 evaluations without a better eval_loss; the weights are those of step 10,"
        " the best of 3 evaluations (eval_loss 1.5)",
        stopped_early=True,
        checkpoint=output.checkpoints / "step-00000010",
    )


def test_without_load_best_the_last_weights_are_published(output: Output) -> None:
    ended = end(output, 1.5, 1.6, 1.7, earlyStoppingPatience=1, earlyStoppingThreshold=0.5)

    assert ended.words == (
        "stopped early at step 30 of 300: 1 evaluation without a better eval_loss by more than 0.5; the weights are"
        " those of the last step, 30"
    )
    assert ended.checkpoint is None


def test_a_run_to_its_last_step_did_not_stop_early(output: Output) -> None:
    ended = end(output, 1.5, 1.6, saved=(10,), last=300, loadBestModelAtEnd=True)

    assert not ended.stopped_early
    assert ended.words == "the weights are those of step 10, the best of 2 evaluations (eval_loss 1.5)"


def test_the_weights_that_the_ranks_hold_need_not_be_read(output: Output) -> None:
    assert end(output, 1.7, 1.6, 1.5, saved=(30,), loadBestModelAtEnd=True).checkpoint is None


def test_where_the_best_checkpoint_is_damaged_the_next_best_is_published_and_told(output: Output) -> None:
    checkpoints_of(output, (10, 20))
    (output.checkpoints / "step-00000010" / "manifest.json").unlink()

    ended = end(output, 1.5, 1.6, 1.7, loadBestModelAtEnd=True)

    assert ended.checkpoint == output.checkpoints / "step-00000020"
    assert "step 20, the best of 3 evaluations with a whole checkpoint (eval_loss 1.6)" in ended.words
    assert ended.passed_over == ("step-00000010: manifest.json is missing",)


def test_evaluations_that_gave_no_number_publish_the_last_weights(output: Output) -> None:
    ended = end(output, NAN, NAN, last=300, loadBestModelAtEnd=True)

    assert ended.words == "no evaluation gave a number for eval_loss, so the weights are those of the last step, 300"
