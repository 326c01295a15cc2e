"""Tests of the validation of job specs by the models, without an API server."""

import pytest
from pydantic import ValidationError

from finetune_api.schema.validation_errors import explain_validation_error
from finetune_api.v1alpha1.job import FineTuneJob, FineTuneJobSpec
from testing.builders.bad_jobs import BAD_JOBS
from testing.builders.jobs import command, spec


def parse_spec(**fields: object) -> FineTuneJobSpec:
    return FineTuneJobSpec.model_validate({key: value for key, value in spec(**fields).items() if value is not None})


@pytest.mark.parametrize("case", BAD_JOBS)
def test_models_reject_every_bad_job(case: str) -> None:
    with pytest.raises(ValidationError) as raised:
        parse_spec(**BAD_JOBS[case].fields)

    assert BAD_JOBS[case].model_error in explain_validation_error(raised.value, parent_path="spec")


def test_base_spec_of_the_bad_jobs_is_valid() -> None:
    assert parse_spec().world_size == 4


@pytest.mark.parametrize(
    "fields",
    [
        pytest.param({"network": {"interface": "bond0"}}, id="interface"),
        pytest.param({"env": [{"name": "GLOO_SOCKET_IFNAME", "value": "bond0"}]}, id="variable of gloo"),
        pytest.param({"numNodes": 1}, id="one node"),
        pytest.param(command({"script": "train.py"}), id="command"),
    ],
)
def test_jobs_on_the_host_network_listen_on_two_adjacent_ports(fields: dict[str, object]) -> None:
    parsed = parse_spec(podTemplate={"hostNetwork": True}, **fields)

    assert (parsed.network.master_port, parsed.status_port) == (29500, 29501)
    assert parse_spec(**fields).status_port == 8080


def test_serialization_for_the_trainer_preserves_the_spec() -> None:
    original_spec = parse_spec(
        training={"learningRate": 2e-5}, env=[{"name": "A", "valueFrom": {"fieldRef": {"fieldPath": "x"}}}]
    )

    parsed_spec = FineTuneJobSpec.model_validate_json(original_spec.model_dump_json(by_alias=True, exclude_unset=True))

    assert parsed_spec == original_spec


def test_unknown_status_fields_of_a_newer_operator_are_ignored() -> None:
    body = {"metadata": {"name": "bert"}, "spec": spec(), "status": {"attempt": 3, "invented": {"later": True}}}

    assert FineTuneJob.parse(body).status.attempt == 3


@pytest.mark.parametrize(
    "field",
    ["activeDeadlineSeconds", "pendingDeadlineSeconds", "startupDeadlineSeconds", "ttlSecondsAfterFinished"],
)
def test_durations_beyond_the_range_of_datetime_are_limited(field: str) -> None:
    parsed = FineTuneJobSpec.model_validate(spec(**{field: 2**53}))

    assert parsed.model_dump(by_alias=True)[field] == 10**11
