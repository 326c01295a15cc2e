"""Tests of run plans."""

from dataclasses import replace
from typing import Any

import pytest

from finetune_api.v1alpha1.job import MAX_JOB_NAME, MAX_NODES
from finetune_operator.plan.run_plan import RunPlan, plan_run, resolve_planned_batch
from finetune_operator.settings import Settings
from testing.builders.jobs import SETTINGS, job

DNS_LABEL = 63


def build_run_plan(*, attempt: int = 0, name: str = "bert", settings: Settings = SETTINGS, **fields: Any) -> RunPlan:
    return plan_run(job(name=name, **fields), attempt=attempt, settings=settings)


def list_pod_names(run_plan: RunPlan) -> list[str]:
    return [node.pod_name for node in run_plan.nodes]


def test_the_master_address_has_the_configured_cluster_domain() -> None:
    run = build_run_plan(settings=Settings(trainer_image="trainer", cluster_domain="corp.example"))
    assert run.master_addr.endswith(".svc.corp.example")


def test_attempts_share_only_the_service_name() -> None:
    first, second = build_run_plan(attempt=0), build_run_plan(attempt=1)
    assert set(list_pod_names(first)).isdisjoint(list_pod_names(second))
    assert first.config_map_name != second.config_map_name
    assert first.service_name == second.service_name


def test_jobs_of_the_same_name_have_different_config_map_names() -> None:
    first = build_run_plan()
    second = replace(first, job_uid="f67e6b24-28e4-4058-a8ce-7b40039a7daa")
    assert (first.config_map_name, second.config_map_name) == ("bert-0-11111111", "bert-0-f67e6b24")


def test_the_longest_pod_names_are_valid_dns_labels() -> None:
    run = build_run_plan(name="j" * MAX_JOB_NAME, attempt=99_999, numNodes=MAX_NODES)
    assert max(map(len, list_pod_names(run))) <= DNS_LABEL


@pytest.mark.parametrize(
    ("fields", "world_size"),
    [
        pytest.param({"numNodes": 1, "nprocPerNode": None}, 1, id="one rank by default"),
        pytest.param({"numNodes": 3, "nprocPerNode": 4}, 12, id="nodes times ranks"),
        pytest.param(
            {"nprocPerNode": None, "resources": {"limits": {"nvidia.com/gpu": "8"}}}, 16, id="one rank per GPU"
        ),
        pytest.param(
            {"nprocPerNode": 1, "resources": {"limits": {"nvidia.com/gpu": 8}}}, 2, id="nprocPerNode overrides the GPUs"
        ),
        pytest.param(
            {"nprocPerNode": None, "resources": {"requests": {"nvidia.com/gpu": 8}}}, 2, id="a request without a limit"
        ),
    ],
)
def test_world_size_is_nodes_times_ranks_per_node(fields: dict[str, Any], world_size: int) -> None:
    run = build_run_plan(**fields)
    assert run.world_size == len(run.nodes) * run.nproc_per_node == world_size


def test_output_folder_defaults_to_namespace_and_name() -> None:
    claim = {"claimName": "models"}
    assert build_run_plan().output_folder == "default/bert"
    assert build_run_plan(output={"persistentVolumeClaim": claim, "subPath": "team/a"}).output_folder == "team/a"


@pytest.mark.parametrize(
    ("training", "batch"),
    [
        pytest.param({}, "1 x 1 x 4 = 4", id="defaults"),
        pytest.param({"globalBatchSize": 32}, "1 x 8 x 4 = 32", id="derived accumulation"),
        pytest.param(
            {"globalBatchSize": 32, "gradientAccumulationSteps": 2}, "4 x 2 x 4 = 32", id="derived micro-batch"
        ),
    ],
)
def test_the_effective_batch_is_divided_over_all_ranks(training: dict[str, int], batch: str) -> None:
    run = build_run_plan(training=training)
    assert str(run.batch) == batch
    assert run.batch == resolve_planned_batch(run.spec)
