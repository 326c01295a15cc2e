"""Tests of the GPUs, ports and environment variables of local nodes."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from finetune_api.v1alpha1.job import FineTuneJob
from finetune_cli.errors import BadInput
from finetune_cli.local.environment import (
    NodePlacement,
    build_environment,
    check_environment,
    count_cpus_per_node,
    find_free_ports,
)
from finetune_cli.local.gpus import divide_gpus, find_gpus
from finetune_cli.local.volume_mapping import LocalMount
from finetune_operator.plan.pod_manifest import build_pod
from finetune_operator.plan.run_plan import plan_run
from testing.builders.jobs import SETTINGS, command, job

PLACEMENT = NodePlacement(
    mounts=(
        LocalMount("/output", Path("/home/me/output")),
        LocalMount("/etc/finetune", Path("/home/me/attempt-0")),
        LocalMount("/run/finetune", Path("/home/me/node-1/run")),
        LocalMount("/dev/termination-log", Path("/home/me/node-1/termination.json")),
        LocalMount("/data", Path("/home/me/data")),
    ),
    master_port=41000,
    status_port=41002,
    gpus=("2", "3"),
    cpus=6,
)


def build_node_environment(
    finetune_job: FineTuneJob, inherited_env: dict[str, str] | None = None, placement: NodePlacement = PLACEMENT
) -> dict[str, str]:
    run = plan_run(finetune_job, attempt=0, settings=SETTINGS)
    container = build_pod(run, run.nodes[1])["spec"]["containers"][0]
    return build_environment(container, placement, inherited_env or {})


@pytest.mark.parametrize(
    ("gpus", "nodes", "ranks", "expected"),
    [
        pytest.param("01234567", 2, 4, ("0123", "4567"), id="all GPUs"),
        pytest.param("01234567", 2, 2, ("01", "23"), id="the first GPUs"),
        pytest.param("", 2, 2, ("", ""), id="no GPUs"),
    ],
)
def test_gpus_are_divided_among_the_nodes(gpus: str, nodes: int, ranks: int, expected: tuple[str, ...]) -> None:
    gpus_by_node = divide_gpus(tuple(gpus), job(numNodes=nodes, nprocPerNode=ranks).spec)

    assert gpus_by_node == tuple(tuple(node_gpus) for node_gpus in expected)


def test_error_for_too_few_gpus_contains_both_numbers() -> None:
    with pytest.raises(BadInput, match="2 nodes x 4 processes need 8 GPUs, this machine has 1; lower spec"):
        divide_gpus(("0",), job(numNodes=2, nprocPerNode=4).spec)


@pytest.mark.parametrize(
    ("visible_devices", "expected"),
    [("0,2", ("0", "2")), ("GPU-5a, GPU-6b", ("GPU-5a", "GPU-6b")), ("", ()), ("-1", ())],
)
def test_gpus_are_limited_by_cuda_visible_devices(visible_devices: str, expected: tuple[str, ...]) -> None:
    assert find_gpus({"CUDA_VISIBLE_DEVICES": visible_devices}) == expected


def test_gpus_are_listed_by_nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nvidia_smi = tmp_path / "nvidia-smi"
    nvidia_smi.write_text('#!/bin/sh\n[ "$1 $2" = "--query-gpu=index --format=csv,noheader" ] && printf "0\\n1\\n"\n')
    nvidia_smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    assert find_gpus({}) == ("0", "1")

    nvidia_smi.write_text("#!/bin/sh\necho 'No devices were found'\nexit 6\n")
    assert find_gpus({}) == ()


def test_addresses_and_paths_are_local() -> None:
    variables = build_node_environment(job(network={"interface": "eth0"}))

    assert (variables["MASTER_ADDR"], variables["PET_MASTER_ADDR"]) == ("127.0.0.1", "127.0.0.1")
    assert (variables["MASTER_PORT"], variables["PET_MASTER_PORT"]) == ("41000", "41000")
    assert (variables["FINETUNE_STATUS_HOST"], variables["FINETUNE_STATUS_PORT"]) == ("127.0.0.1", "41002")
    assert variables["FINETUNE_OUTPUT"] == "/home/me/output/default/bert"
    assert variables["FINETUNE_CONFIG"] == "/home/me/attempt-0/job.json"
    assert variables["FINETUNE_RUN_DIR"] == "/home/me/node-1/run"
    assert variables["FINETUNE_TERMINATION_LOG"] == "/home/me/node-1/termination.json"
    assert variables["FINETUNE_CACHE_DIR"] == "/home/me/output/cache"
    assert variables["CUDA_VISIBLE_DEVICES"] == "2,3"
    assert variables["GLOO_SOCKET_IFNAME"].startswith("lo")
    assert (variables["NODE_RANK"], variables["NNODES"], variables["NPROC_PER_NODE"]) == ("1", "2", "2")


def test_environment_contains_no_container_paths() -> None:
    for finetune_job in (job(), job(**command({"script": "train.py"}, output=None))):
        paths = {name: value for name, value in build_node_environment(finetune_job).items() if value.startswith("/")}

        assert paths
        assert all(value.startswith("/home/me/") for value in paths.values()), paths


def test_home_and_model_cache_of_the_user_are_used_unless_the_job_sets_them() -> None:
    home = {"HOME": "/home/me", "HF_HOME": "/home/me/hf", "USER": "me"}
    variables = build_node_environment(job(), home)
    assert variables.items() >= home.items()
    assert not variables.keys() & {"HF_HUB_CACHE", "HF_XET_CACHE", "HF_DATASETS_CACHE"}
    job_without_output = job(**command({"script": "train.py"}, output=None))
    assert build_node_environment(job_without_output, home).items() >= home.items()

    job_with_home = job(env=[{"name": "HF_HOME", "value": "/data/hf"}])
    assert build_node_environment(job_with_home, home)["HF_HOME"] == "/home/me/data/hf", "a path on a volume is mapped"


def test_torchrun_variables_of_the_caller_are_not_inherited() -> None:
    variables = build_node_environment(
        job(), {"RANK": "3", "PET_NNODES": "9", "TORCHELASTIC_RUN_ID": "x", "PATH": "/bin"}
    )

    assert variables["PATH"] == "/bin"
    assert variables["PET_NNODES"] == "2"
    assert not {"RANK", "WORLD_SIZE", "LOCAL_RANK", "TORCHELASTIC_RUN_ID"} & variables.keys()


def test_cuda_visible_devices_is_not_set_without_gpus() -> None:
    placement = replace(PLACEMENT, gpus=())
    assert "CUDA_VISIBLE_DEVICES" not in build_node_environment(job(), placement=placement)


def test_secrets_are_read_from_the_environment_of_the_user() -> None:
    secret_ref: dict[str, Any] = {"secretKeyRef": {"name": "hub", "key": "token"}}
    finetune_job = job(env=[{"name": "HF_TOKEN", "valueFrom": secret_ref}])

    with pytest.raises(BadInput, match=r"spec.env: HF_TOKEN: valueFrom needs a cluster; set HF_TOKEN"):
        check_environment(finetune_job.spec, {})
    check_environment(finetune_job.spec, {"HF_TOKEN": "t"})
    assert build_node_environment(finetune_job, {"HF_TOKEN": "t"}).items() >= {"HF_TOKEN": "t"}.items()


def test_ports_are_distinct_and_unprivileged() -> None:
    ports = find_free_ports(20)

    assert len(set(ports)) == 20
    assert all(1024 <= port < 65536 for port in ports)


@pytest.mark.parametrize(
    ("fields", "threads", "cpus"),
    [
        pytest.param({}, "1", "6", id="no limit"),
        pytest.param({"resources": {"limits": {"cpu": "4"}}}, "2", "4", id="limit below the CPUs of this host"),
        pytest.param({"resources": {"requests": {"cpu": "32"}}}, "3", "6", id="request above the CPUs of this host"),
        pytest.param(
            {"resources": {"limits": {"cpu": "32"}}, "env": [{"name": "OMP_NUM_THREADS", "value": "5"}]},
            "5",
            "6",
            id="threads of the user",
        ),
    ],
)
def test_threads_are_limited_by_the_cpus_of_this_host(fields: dict[str, Any], threads: str, cpus: str) -> None:
    variables = build_node_environment(job(nprocPerNode=2, **fields))

    assert (variables["OMP_NUM_THREADS"], variables["FINETUNE_CPUS"]) == (threads, cpus)


def test_gpus_in_the_limits_are_not_expected_on_this_host() -> None:
    assert "FINETUNE_GPUS" not in build_node_environment(job(resources={"limits": {"nvidia.com/gpu": 2}}))
    assert "FINETUNE_OTHER_GPUS" not in build_node_environment(job(resources={"limits": {"amd.com/gpu": 2}}))


def test_cpus_of_this_host_are_divided_among_the_nodes() -> None:
    assert count_cpus_per_node(1) == len(os.sched_getaffinity(0))
    assert count_cpus_per_node(10**6) == 1
