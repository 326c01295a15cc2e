"""Test batch, schedule and fingerprint of the training plan."""

import json
from typing import Any

import pytest

from finetune_api.batch import Batch
from finetune_api.v1alpha1.job import TrainerSpec
from finetune_api.v1alpha1.recorded_defaults import apply_defaults
from finetune_trainer.errors import InvalidSpec
from finetune_trainer.training_plan import plan_training
from testing.builders import jobs


def parse_spec(**fields: Any) -> TrainerSpec:
    return jobs.parse_spec(**{"lora": None, "numNodes": 1, "nprocPerNode": 1, **fields})


def compute_fingerprint(**fields: Any) -> str:
    return plan_training(parse_spec(**fields), world_size=2).fingerprint


@pytest.mark.parametrize(
    ("training", "total_steps"),
    [
        pytest.param({}, 39, id="three epochs by default"),
        pytest.param({"numTrainEpochs": 0.5}, 7, id="half an epoch"),
        pytest.param({"maxSteps": 5}, 5, id="maxSteps"),
    ],
)
def test_last_step_of_an_epoch_may_be_incomplete(training: dict[str, Any], total_steps: int) -> None:
    plan = plan_training(parse_spec(training={"perDeviceTrainBatchSize": 8, **training}), world_size=1)

    schedule = plan.with_samples(100).schedule

    assert schedule.steps_per_epoch == 13
    assert schedule.total_steps == total_steps


def test_fingerprint_does_not_depend_on_the_batch_split() -> None:
    one_micro_batch = compute_fingerprint(training={"globalBatchSize": 8, "perDeviceTrainBatchSize": 4})
    accumulated_batch = compute_fingerprint(training={"perDeviceTrainBatchSize": 1, "gradientAccumulationSteps": 4})

    assert one_micro_batch == accumulated_batch


def test_fingerprint_ignores_fields_that_do_not_affect_the_result() -> None:
    ignored_fields = {"loggingSteps": 5, "saveSteps": 7, "ddpTimeout": 60, "probe": True, "allowMixedHardware": True}

    assert compute_fingerprint() == compute_fingerprint(training=ignored_fields, numNodes=2)


def test_fingerprint_contains_only_what_the_user_set() -> None:
    defaults = json.dumps({"training": {"seed": 7, "maxGradNorm": 0.5}, "dataset": {"packing": True}})
    spec = apply_defaults(parse_spec(), defaults)

    assert spec.training.seed == 7
    assert plan_training(spec, world_size=2).fingerprint == compute_fingerprint()


def test_fingerprint_names_the_version_of_its_algorithm() -> None:
    assert compute_fingerprint().startswith("v2:")


@pytest.mark.parametrize(
    "changed_fields",
    [
        pytest.param({"training": {"seed": 1}}, id="seed"),
        pytest.param({"training": {"globalBatchSize": 8}}, id="effective batch"),
        pytest.param({"training": {"averageTokensAcrossDevices": False}}, id="averaging"),
        pytest.param({"lora": {}}, id="lora"),
        pytest.param({"model": {"name": "/models/other"}}, id="model"),
        pytest.param({"dataset": {"train": [{"name": "/data/other.jsonl"}]}}, id="dataset"),
    ],
)
def test_fingerprint_includes_fields_that_affect_the_result(changed_fields: dict[str, Any]) -> None:
    assert compute_fingerprint(**changed_fields) != compute_fingerprint()


def test_with_micro_batch_changes_only_the_batch_split() -> None:
    scaling = {"learningRate": 1e-4, "lrScaling": {"rule": "linear", "baseBatchSize": 4}}
    training = {"perDeviceTrainBatchSize": "auto", "globalBatchSize": 16, **scaling}
    plan = plan_training(parse_spec(training=training), world_size=2).with_samples(100)

    changed_plan = plan.with_micro_batch(Batch(4, 2, 2))

    assert (plan.batch, plan.eval_batch) == (Batch(1, 8, 2), Batch(1, 1, 2))
    assert (changed_plan.batch, changed_plan.eval_batch) == (Batch(4, 2, 2), Batch(4, 1, 2))
    assert (changed_plan.schedule, changed_plan.learning_rates, changed_plan.fingerprint) == (
        plan.schedule,
        plan.learning_rates,
        plan.fingerprint,
    )
    assert plan_training(changed_plan.spec, world_size=2).with_samples(100) == changed_plan


def test_unreachable_global_batch_size_is_rejected() -> None:
    with pytest.raises(InvalidSpec, match=r"spec\.training: globalBatchSize 5 is not a multiple"):
        plan_training(parse_spec(training={"globalBatchSize": 5}), world_size=2)
