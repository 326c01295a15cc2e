"""Validation of job specs by the models, without an API server."""

import pytest
from pydantic import ValidationError

from finetune_api.schema.validation_errors import explain_validation_error
from finetune_api.v1alpha1.job import FineTuneJob, FineTuneJobSpec
from testing.builders.bad_jobs import BAD_JOBS
from testing.builders.jobs import spec


def parse(**fields: object) -> FineTuneJobSpec:
    return FineTuneJobSpec.model_validate({key: value for key, value in spec(**fields).items() if value is not None})


@pytest.mark.parametrize("case", BAD_JOBS)
def test_the_models_reject_what_the_api_server_rejects(case: str) -> None:
    with pytest.raises(ValidationError) as raised:
        parse(**BAD_JOBS[case].fields)

    assert BAD_JOBS[case].model_error in explain_validation_error(raised.value, within="spec")


def test_the_base_of_the_bad_jobs_is_valid() -> None:
    assert parse().world_size == 4


def test_there_is_one_rank_per_gpu_by_default() -> None:
    limits = {"nvidia.com/gpu": 8, "memory": "64Gi"}

    assert parse(nprocPerNode=None, resources={"limits": limits}).ranks_per_node == 8
    assert parse(nprocPerNode=2, resources={"limits": limits}).ranks_per_node == 2
    assert parse(nprocPerNode=None).ranks_per_node == 1


@pytest.mark.parametrize("count", [pytest.param(8, id="number"), pytest.param("8", id="string")])
def test_a_gpu_count_may_be_a_number_or_a_string(count: int | str) -> None:
    assert parse(nprocPerNode=None, resources={"limits": {"amd.com/gpu": count}}).ranks_per_node == 8


def test_a_spec_is_unchanged_by_serialization_for_the_trainer() -> None:
    before = parse(training={"learningRate": 2e-5}, env=[{"name": "A", "valueFrom": {"fieldRef": {"fieldPath": "x"}}}])

    after = FineTuneJobSpec.model_validate_json(before.model_dump_json(by_alias=True, exclude_unset=True))

    assert after == before


def test_unknown_status_fields_of_a_newer_operator_are_ignored() -> None:
    body = {"metadata": {"name": "bert"}, "spec": spec(), "status": {"attempt": 3, "invented": {"later": True}}}

    assert FineTuneJob.parse(body).status.attempt == 3


def test_auto_lets_the_trainer_choose_the_micro_batch() -> None:
    training = parse(training={"globalBatchSize": 16, "perDeviceTrainBatchSize": "auto"}).training

    assert training.has_auto_batch
    assert not parse(training={"globalBatchSize": 16}).training.has_auto_batch
