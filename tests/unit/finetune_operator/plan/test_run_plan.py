"""One attempt in numbers and names, before any object is spelled out."""

from typing import Any

import pytest

from finetune_api.v1alpha1.job import MAX_JOB_NAME, MAX_NODES
from finetune_operator.plan.run_plan import RunPlan, Settings, batch_of, plan_run
from testing.builders.jobs import SETTINGS, UID, job

DNS_LABEL = 63


def run_of(*, attempt: int = 0, name: str = "bert", settings: Settings = SETTINGS, **fields: Any) -> RunPlan:
    return plan_run(job(name=name, **fields), attempt=attempt, settings=settings)


def pod_names(run: RunPlan) -> list[str]:
    return [node.pod_name for node in run.nodes]


def test_the_same_arguments_give_the_same_plan() -> None:
    assert run_of(attempt=3) == run_of(attempt=3)


def test_the_master_is_the_pod_of_rank_zero() -> None:
    assert run_of(numNodes=3).master_addr == "bert-0-0.bert.default.svc.cluster.local"


def test_the_master_is_found_in_a_cluster_with_a_domain_of_its_own() -> None:
    run = run_of(settings=Settings(trainer_image="trainer", cluster_domain="corp.example"))
    assert run.master_addr.endswith(".svc.corp.example")


def test_nodes_are_numbered_from_zero() -> None:
    run = run_of(numNodes=3)
    assert [node.node_rank for node in run.nodes] == [0, 1, 2]
    assert pod_names(run) == ["bert-0-0", "bert-0-1", "bert-0-2"]


def test_attempts_share_the_service_and_nothing_else() -> None:
    first, second = run_of(attempt=0), run_of(attempt=1)
    assert set(pod_names(first)).isdisjoint(pod_names(second))
    assert first.config_map_name != second.config_map_name
    assert first.service_name == second.service_name


def test_the_longest_names_are_still_host_names() -> None:
    run = run_of(name="j" * MAX_JOB_NAME, attempt=99_999, numNodes=MAX_NODES)
    assert max(map(len, pod_names(run))) <= DNS_LABEL


@pytest.mark.parametrize(
    ("fields", "world_size"),
    [
        pytest.param({"numNodes": 1, "nprocPerNode": None}, 1, id="one rank unless more is said"),
        pytest.param({"numNodes": 3, "nprocPerNode": 4}, 12, id="nodes times ranks"),
        pytest.param(
            {"nprocPerNode": None, "resources": {"limits": {"nvidia.com/gpu": "8"}}}, 16, id="one rank for each GPU"
        ),
        pytest.param(
            {"nprocPerNode": 1, "resources": {"limits": {"nvidia.com/gpu": 8}}}, 2, id="nprocPerNode is the user's"
        ),
        pytest.param(
            {"nprocPerNode": None, "resources": {"requests": {"nvidia.com/gpu": 8}}}, 2, id="a request is no limit"
        ),
    ],
)
def test_the_world_is_every_rank_of_every_node(fields: dict[str, Any], world_size: int) -> None:
    run = run_of(**fields)
    assert run.world_size == len(run.nodes) * run.nproc_per_node == world_size


def test_the_image_is_the_users_or_else_the_installations() -> None:
    assert run_of(image="mine:1").image == "mine:1"
    assert run_of().image == SETTINGS.trainer_image


def test_the_output_is_apart_for_each_job_unless_a_folder_is_named() -> None:
    claim = {"claimName": "models"}
    assert run_of().output_folder == "default/bert"
    assert run_of(output={"persistentVolumeClaim": claim, "subPath": "team/a"}).output_folder == "team/a"


def test_the_plan_is_of_one_job_and_not_merely_of_a_name() -> None:
    assert run_of().job_uid == UID


@pytest.mark.parametrize(
    ("training", "batch"),
    [
        pytest.param({}, "1 x 1 x 4 = 4", id="nothing said"),
        pytest.param({"globalBatchSize": 32}, "1 x 8 x 4 = 32", id="derived accumulation"),
        pytest.param({"globalBatchSize": 32, "gradientAccumulationSteps": 2}, "4 x 2 x 4 = 32", id="derived samples"),
    ],
)
def test_the_batch_is_spread_over_all_ranks(training: dict[str, int], batch: str) -> None:
    run = run_of(training=training)
    assert str(run.batch) == batch
    assert run.batch == batch_of(run.spec)
