"""The training plan: batch, schedule and fingerprint of a spec."""

from typing import Any

import pytest

from finetune_api.batch import Batch
from finetune_api.v1alpha1.job import TrainerSpec
from finetune_trainer.errors import InvalidSpec
from finetune_trainer.training_plan import plan_training
from testing.builders.jobs import spec as build_spec


def spec(**fields: Any) -> TrainerSpec:
    return TrainerSpec.model_validate(build_spec(**{"lora": None, "numNodes": 1, "nprocPerNode": 1, **fields}))


def fingerprint_of(**fields: Any) -> str:
    return plan_training(spec(**fields), world_size=2).fingerprint


@pytest.mark.parametrize(
    ("training", "total_steps"),
    [
        pytest.param({}, 39, id="three epochs by default"),
        pytest.param({"numTrainEpochs": 0.5}, 7, id="half an epoch"),
        pytest.param({"maxSteps": 5}, 5, id="maxSteps"),
    ],
)
def test_an_epoch_ends_with_an_incomplete_step(training: dict[str, Any], total_steps: int) -> None:
    plan = plan_training(spec(training={"perDeviceTrainBatchSize": 8, **training}), world_size=1)

    schedule = plan.with_samples(100).schedule

    assert schedule.steps_per_epoch == 13
    assert schedule.total_steps == total_steps


def test_layouts_with_the_same_effective_batch_have_the_same_fingerprint() -> None:
    one_micro_batch = fingerprint_of(training={"globalBatchSize": 8, "perDeviceTrainBatchSize": 4})
    accumulated = fingerprint_of(training={"perDeviceTrainBatchSize": 1, "gradientAccumulationSteps": 4})

    assert one_micro_batch == accumulated


def test_fields_that_do_not_change_the_result_are_not_in_the_fingerprint() -> None:
    without_effect = {"loggingSteps": 5, "saveSteps": 7, "ddpTimeout": 60, "probe": True, "allowMixedHardware": True}

    assert fingerprint_of() == fingerprint_of(training=without_effect, numNodes=2)


@pytest.mark.parametrize(
    "changed",
    [
        pytest.param({"training": {"seed": 1}}, id="seed"),
        pytest.param({"training": {"globalBatchSize": 8}}, id="effective batch"),
        pytest.param({"training": {"averageTokensAcrossDevices": False}}, id="averaging"),
        pytest.param({"lora": {}}, id="lora"),
        pytest.param({"model": {"name": "/models/other"}}, id="model"),
        pytest.param({"dataset": {"train": [{"name": "/data/other.jsonl"}]}}, id="dataset"),
    ],
)
def test_fields_that_change_the_result_are_in_the_fingerprint(changed: dict[str, Any]) -> None:
    assert fingerprint_of(**changed) != fingerprint_of()


def test_another_micro_batch_changes_nothing_but_the_split_of_the_batch() -> None:
    scaling = {"learningRate": 1e-4, "lrScaling": {"rule": "linear", "baseBatchSize": 4}}
    training = {"perDeviceTrainBatchSize": "auto", "globalBatchSize": 16, **scaling}
    plan = plan_training(spec(training=training), world_size=2).with_samples(100)

    changed = plan.with_micro_batch(Batch(4, 2, 2))

    assert (plan.batch, plan.eval_batch) == (Batch(1, 8, 2), Batch(1, 1, 2))
    assert (changed.batch, changed.eval_batch) == (Batch(4, 2, 2), Batch(4, 1, 2))
    assert (changed.schedule, changed.rates, changed.fingerprint) == (plan.schedule, plan.rates, plan.fingerprint)
    assert plan_training(changed.spec, world_size=2).with_samples(100) == changed


def test_a_global_batch_size_that_cannot_be_reached_is_rejected() -> None:
    with pytest.raises(InvalidSpec, match=r"spec\.training: globalBatchSize 5 is not a multiple"):
        plan_training(spec(training={"globalBatchSize": 5}), world_size=2)
