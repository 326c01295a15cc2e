"""What a spec may say, where no API server looks first."""

import pytest
from pydantic import ValidationError

from finetune_api.schema.validation_errors import explain
from finetune_api.v1alpha1.job import FineTuneJob, FineTuneJobSpec
from testing.builders.bad_jobs import BAD_JOBS
from testing.builders.jobs import spec


def parse(**fields: object) -> FineTuneJobSpec:
    return FineTuneJobSpec.model_validate({key: value for key, value in spec(**fields).items() if value is not None})


@pytest.mark.parametrize("case", BAD_JOBS)
def test_the_models_refuse_what_the_api_server_refuses(case: str) -> None:
    with pytest.raises(ValidationError) as refused:
        parse(**BAD_JOBS[case].fields)

    assert BAD_JOBS[case].models in explain(refused.value, within="spec")


def test_the_base_of_all_bad_jobs_is_good() -> None:
    assert parse().world_size == 4


def test_one_process_per_gpu_unless_told_otherwise() -> None:
    limits = {"nvidia.com/gpu": 8, "memory": "64Gi"}

    assert parse(nprocPerNode=None, resources={"limits": limits}).ranks_per_node == 8
    assert parse(nprocPerNode=2, resources={"limits": limits}).ranks_per_node == 2
    assert parse(nprocPerNode=None).ranks_per_node == 1


@pytest.mark.parametrize("count", [8, "8"])
def test_gpus_may_be_a_number_or_a_string(count: int | str) -> None:
    assert parse(nprocPerNode=None, resources={"limits": {"amd.com/gpu": count}}).ranks_per_node == 8


def test_a_spec_survives_the_way_to_the_trainer() -> None:
    before = parse(training={"learningRate": 2e-5}, env=[{"name": "A", "valueFrom": {"fieldRef": {"fieldPath": "x"}}}])

    after = FineTuneJobSpec.model_validate_json(before.model_dump_json(by_alias=True, exclude_unset=True))

    assert after == before


def test_a_newer_operators_status_can_be_read() -> None:
    body = {"metadata": {"name": "bert"}, "spec": spec(), "status": {"attempt": 3, "invented": {"later": True}}}

    assert FineTuneJob.parse(body).status.attempt == 3


def test_a_job_may_leave_the_size_of_its_micro_batches_to_the_trainer() -> None:
    training = parse(training={"globalBatchSize": 16, "perDeviceTrainBatchSize": "auto"}).training

    assert training.chooses_batch
    assert not parse(training={"globalBatchSize": 16}).training.chooses_batch
