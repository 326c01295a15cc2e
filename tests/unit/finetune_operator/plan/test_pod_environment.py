"""Tests of the environment variables of the trainer container."""

from typing import Any

import pytest

from finetune_api.v1alpha1.job import GRACE_SECONDS
from finetune_operator.plan.pod_environment import build_environment
from testing.builders.manifests import ALL_FIELDS, build_first_pod_manifest, build_run_plan, build_trainer_container


def read_environment_variables(**fields: Any) -> dict[str, str]:
    return {variable["name"]: variable.get("value", "") for variable in build_trainer_container(**fields)["env"]}


@pytest.mark.parametrize("fields", [pytest.param({}, id="minimal"), pytest.param(ALL_FIELDS, id="everything")])
def test_pod_does_not_set_the_variables_that_torchrun_sets(fields: dict[str, Any]) -> None:
    variable_names = read_environment_variables(**fields).keys()
    assert {"MASTER_ADDR", "NODE_RANK"} <= variable_names
    assert variable_names.isdisjoint({"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "CUDA_VISIBLE_DEVICES"})


def test_pet_variables_equal_those_of_the_trainer() -> None:
    run = build_run_plan()
    for node in run.nodes:
        environment = build_environment(run, node)
        torchrun_variables = {
            name.removeprefix("PET_"): value for name, value in environment.items() if name.startswith("PET_")
        }
        assert torchrun_variables.keys() == {"NNODES", "NODE_RANK", "NPROC_PER_NODE", "MASTER_ADDR", "MASTER_PORT"}
        assert torchrun_variables.items() <= environment.items()
        assert torchrun_variables["NODE_RANK"] == str(node.node_rank)


@pytest.mark.parametrize(
    ("fields", "seconds"),
    [({}, GRACE_SECONDS), ({"terminationGracePeriodSeconds": 3600}, 3600)],
    ids=["default", "set"],
)
def test_supervisor_and_torchrun_stop_within_the_grace_period(fields: dict[str, Any], seconds: int) -> None:
    variables = read_environment_variables(**fields)

    assert build_first_pod_manifest(**fields)["spec"]["terminationGracePeriodSeconds"] == seconds
    assert variables["FINETUNE_GRACE_SECONDS"] == str(seconds)
    assert seconds - 60 < int(variables["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"]) < seconds


def test_user_variable_overrides_the_default() -> None:
    variable_names = [variable["name"] for variable in build_trainer_container(**ALL_FIELDS)["env"]]
    assert len(variable_names) == len(set(variable_names))
    assert read_environment_variables(**ALL_FIELDS)["HF_HOME"] == "/models/hub"


def test_jobs_of_one_claim_share_downloads_but_neither_login_token_nor_code() -> None:
    """HF_HOME contains the token of `hf auth login` and the modules of remote code."""
    variables = read_environment_variables()
    assert variables.keys() & {"HF_HOME", "HF_TOKEN_PATH", "HF_MODULES_CACHE"} == set()
    assert variables["HF_HUB_CACHE"] == "/output/cache/huggingface/hub"

    assert "HF_HUB_CACHE" not in read_environment_variables(**ALL_FIELDS), "HF_HOME of the user determines it"


@pytest.mark.parametrize(
    ("resources", "nproc_per_node", "threads", "cpus"),
    [
        pytest.param({}, 2, "1", None, id="neither limit nor request: default of torchrun"),
        pytest.param({"limits": {"cpu": "8"}}, 2, "4", "8", id="divided evenly"),
        pytest.param({"limits": {"cpu": 7}}, 2, "3", "7", id="rounded down"),
        pytest.param({"limits": {"cpu": "1500m"}}, 4, "1", "1.5", id="at least one"),
        pytest.param({"requests": {"cpu": "96"}, "limits": {"nvidia.com/gpu": 8}}, 8, "12", "96", id="request"),
        pytest.param({"requests": {"cpu": "2"}, "limits": {"cpu": "16"}}, 2, "8", "16", id="limit above the request"),
    ],
)
def test_threads_per_rank_are_a_share_of_the_cpu_limit_or_request(
    resources: dict[str, Any], nproc_per_node: int, threads: str, cpus: str | None
) -> None:
    variables = read_environment_variables(resources=resources, nprocPerNode=nproc_per_node)

    assert variables["OMP_NUM_THREADS"] == threads
    assert variables.get("FINETUNE_CPUS") == cpus


@pytest.mark.parametrize(
    ("limits", "gpus"),
    [({"nvidia.com/gpu": 8}, "8"), ({"nvidia.com/gpu": 0}, None), ({"amd.com/gpu": 8}, None), ({}, None)],
)
def test_nvidia_gpus_of_the_limits_are_passed_to_the_trainer(limits: dict[str, Any], gpus: str | None) -> None:
    assert read_environment_variables(resources={"limits": limits}).get("FINETUNE_GPUS") == gpus


@pytest.mark.parametrize(
    ("limits", "resource"),
    [
        ({"amd.com/gpu": 8}, "amd.com/gpu"),
        ({"example.com/gpu": 1, "nvidia.com/gpu": 0}, "example.com/gpu"),
        ({"nvidia.com/gpu": 8}, None),
        ({"amd.com/gpu": 0}, None),
        ({}, None),
    ],
)
def test_gpus_of_another_vendor_are_named_to_the_trainer(limits: dict[str, Any], resource: str | None) -> None:
    assert read_environment_variables(resources={"limits": limits}).get("FINETUNE_OTHER_GPUS") == resource


@pytest.mark.parametrize(
    ("nccl", "variable"),
    [
        pytest.param({"ibDisable": True}, ("NCCL_IB_DISABLE", "1"), id="true is 1"),
        pytest.param({"p2pDisable": False}, ("NCCL_P2P_DISABLE", "0"), id="false is 0"),
        pytest.param({"ibGidIndex": 3}, ("NCCL_IB_GID_INDEX", "3"), id="number"),
    ],
)
def test_nccl_booleans_are_converted_to_numbers(nccl: dict[str, Any], variable: tuple[str, str]) -> None:
    assert variable in read_environment_variables(network={"nccl": nccl}).items()
