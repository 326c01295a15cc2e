"""Tests of the manifests of one attempt, including a comparison with golden files."""

from typing import Any

import pytest

from finetune_api.v1alpha1.job import FineTuneJobSpec
from finetune_api.v1alpha1.status import JobSnapshot, JobStatus
from finetune_operator import names
from finetune_operator.plan.config_map import build_config_map
from finetune_operator.plan.manifests import build_children
from finetune_operator.plan.run_plan import plan_run
from testing.builders.golden import BASES, assert_golden
from testing.builders.jobs import SETTINGS, UID, command, job
from testing.builders.manifests import (
    ALL_FIELDS,
    build_first_pod_manifest,
    build_pod_manifests,
    build_run_plan,
    build_trainer_container,
)


def read_environment_variables(**fields: Any) -> dict[str, str]:
    return {variable["name"]: variable.get("value", "") for variable in build_trainer_container(**fields)["env"]}


def test_manifests_of_a_minimal_job_equal_the_golden_file() -> None:
    assert_golden("two-nodes", BASES["two-nodes"]())


def test_manifests_of_a_job_with_all_fields_equal_the_golden_file() -> None:
    assert_golden("everything", build_children(build_run_plan(**ALL_FIELDS)))


def test_manifests_of_a_job_with_a_command_equal_the_golden_file() -> None:
    program = {"script": "train_dpo.py", "args": ["--batch_size", "4"], "workingDir": "/workspace/trainer"}
    assert_golden("command", build_children(build_run_plan(attempt=1, **command(program))), base="two-nodes")


def test_the_config_map_contains_the_defaults_with_which_the_job_began() -> None:
    status = JobStatus(snapshot=JobSnapshot(image="trainer:v1", defaults='{"numNodes":1}'))
    config_map = build_config_map(plan_run(job(status=status), attempt=0, settings=SETTINGS))

    assert config_map["data"]["defaults.json"] == '{"numNodes":1}'


def test_command_without_output_has_no_output_volume_or_variables() -> None:
    fields = command({"script": "train.py"}, output=None)
    pod = build_first_pod_manifest(**fields)["spec"]
    assert "output" not in {volume["name"] for volume in pod["volumes"]}
    assert names.OUTPUT_DIR not in {mount["mountPath"] for mount in pod["containers"][0]["volumeMounts"]}
    assert "FINETUNE_OUTPUT" not in read_environment_variables(**fields)
    assert not [
        name for name, value in read_environment_variables(**fields).items() if value.startswith(names.OUTPUT_DIR)
    ]


def test_every_child_has_an_owner_reference_to_the_job() -> None:
    for child in build_children(build_run_plan()):
        [owner] = child["metadata"]["ownerReferences"]
        assert (owner["kind"], owner["name"], owner["uid"], owner["controller"]) == ("FineTuneJob", "bert", UID, True)
        assert child["metadata"]["labels"][names.JOB_UID] == UID


def test_service_selects_pods_of_all_attempts_even_if_not_ready() -> None:
    service = build_children(build_run_plan())[0]["spec"]
    for attempt in (0, 7):
        for pod in build_pod_manifests(build_run_plan(attempt=attempt)):
            assert service["selector"].items() <= pod["metadata"]["labels"].items()
    assert service["publishNotReadyAddresses"]


@pytest.mark.parametrize("fields", [pytest.param({}, id="minimal"), pytest.param(ALL_FIELDS, id="everything")])
def test_config_map_contains_the_spec_of_the_run_plan(fields: dict[str, Any]) -> None:
    run = build_run_plan(**fields)
    text = build_children(run)[1]["data"]["job.json"]
    assert FineTuneJobSpec.model_validate_json(text) == run.spec
    assert "maxGradNorm" not in text  # the trainer fills in defaults of omitted fields
