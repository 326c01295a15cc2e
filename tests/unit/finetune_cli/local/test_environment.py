"""What of this machine a node gets: GPUs, ports and an environment."""

from pathlib import Path
from typing import Any

import pytest

from finetune_api.v1alpha1.job import FineTuneJob
from finetune_cli.errors import BadInput
from finetune_cli.local.environment import Place, check_environment, find_ports, local_environment
from finetune_cli.local.gpus import divide_gpus, find_gpus
from finetune_cli.local.volume_mapping import Mount
from finetune_operator.plan.manifests import build_pod
from finetune_operator.plan.run_plan import plan_run
from testing.builders.jobs import SETTINGS, command, job

PLACE = Place(
    mounts=(
        Mount("/output", Path("/home/me/output")),
        Mount("/etc/finetune", Path("/home/me/attempt-0")),
        Mount("/run/finetune", Path("/home/me/node-1/run")),
        Mount("/dev/termination-log", Path("/home/me/node-1/termination.json")),
        Mount("/data", Path("/home/me/data")),
    ),
    master_port=41000,
    status_port=41002,
    gpus=("2", "3"),
)


def environment(of: FineTuneJob, inherited: dict[str, str] | None = None, place: Place = PLACE) -> dict[str, str]:
    run = plan_run(of, attempt=0, settings=SETTINGS)
    container = build_pod(run, run.nodes[1])["spec"]["containers"][0]
    return local_environment(container, place, inherited or {})


@pytest.mark.parametrize(
    ("gpus", "nodes", "ranks", "expected"),
    [
        pytest.param("01234567", 2, 4, ("0123", "4567"), id="all of them"),
        pytest.param("01234567", 2, 2, ("01", "23"), id="the first of them"),
        pytest.param("", 2, 2, ("", ""), id="a machine without any"),
    ],
)
def test_gpus_are_divided_among_the_nodes(gpus: str, nodes: int, ranks: int, expected: tuple[str, ...]) -> None:
    shares = divide_gpus(tuple(gpus), job(numNodes=nodes, nprocPerNode=ranks).spec)

    assert shares == tuple(tuple(share) for share in expected)


def test_too_few_gpus_are_refused_with_the_numbers() -> None:
    with pytest.raises(BadInput, match="2 nodes x 4 processes need 8 GPUs, this machine has 1; lower spec"):
        divide_gpus(("0",), job(numNodes=2, nprocPerNode=4).spec)


@pytest.mark.parametrize(
    ("visible", "expected"),
    [("0,2", ("0", "2")), ("GPU-5a, GPU-6b", ("GPU-5a", "GPU-6b")), ("", ()), ("-1", ())],
)
def test_only_visible_gpus_count(visible: str, expected: tuple[str, ...]) -> None:
    assert find_gpus({"CUDA_VISIBLE_DEVICES": visible}) == expected


def test_gpus_are_asked_of_the_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text('#!/bin/sh\n[ "$1 $2" = "--query-gpu=index --format=csv,noheader" ] && printf "0\\n1\\n"\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    assert find_gpus({}) == ("0", "1")

    tool.write_text("#!/bin/sh\necho 'No devices were found'\nexit 6\n")
    assert find_gpus({}) == ()


def test_addresses_and_paths_are_those_of_this_machine() -> None:
    found = environment(job(network={"interface": "eth0"}))

    assert (found["MASTER_ADDR"], found["PET_MASTER_ADDR"]) == ("127.0.0.1", "127.0.0.1")
    assert (found["MASTER_PORT"], found["PET_MASTER_PORT"]) == ("41000", "41000")
    assert found["FINETUNE_STATUS_PORT"] == "41002"
    assert found["FINETUNE_OUTPUT"] == "/home/me/output/default/bert"
    assert found["FINETUNE_CONFIG"] == "/home/me/attempt-0/job.json"
    assert found["FINETUNE_RUN_DIR"] == "/home/me/node-1/run"
    assert found["FINETUNE_TERMINATION_LOG"] == "/home/me/node-1/termination.json"
    assert found["FINETUNE_CACHE_DIR"] == "/home/me/output/cache"
    assert found["CUDA_VISIBLE_DEVICES"] == "2,3"
    assert found["GLOO_SOCKET_IFNAME"].startswith("lo")
    assert (found["NODE_RANK"], found["NNODES"], found["NPROC_PER_NODE"]) == ("1", "2", "2")


def test_no_path_of_a_container_is_left() -> None:
    for of in (job(), job(**command({"script": "train.py"}, output=None))):
        ours = {name: value for name, value in environment(of).items() if value.startswith("/")}

        assert ours
        assert all(value.startswith("/home/me/") for value in ours.values()), ours


def test_the_users_home_and_models_are_used_unless_the_job_names_others() -> None:
    home = {"HOME": "/home/me", "HF_HOME": "/home/me/hf", "USER": "me"}
    assert environment(job(), home).items() >= home.items()
    without_output = job(**command({"script": "train.py"}, output=None))
    assert environment(without_output, home).items() >= home.items()

    named = job(env=[{"name": "HF_HOME", "value": "/data/hf"}])
    assert environment(named, home)["HF_HOME"] == "/home/me/data/hf", "a path on a volume is found as datasets are"


def test_another_torchruns_variables_are_not_inherited() -> None:
    found = environment(job(), {"RANK": "3", "PET_NNODES": "9", "TORCHELASTIC_RUN_ID": "x", "PATH": "/bin"})

    assert found["PATH"] == "/bin"
    assert found["PET_NNODES"] == "2"
    assert not {"RANK", "WORLD_SIZE", "LOCAL_RANK", "TORCHELASTIC_RUN_ID"} & found.keys()


def test_a_machine_without_gpus_leaves_the_visible_devices_alone() -> None:
    place = Place(PLACE.mounts, 1, 2, gpus=())
    assert "CUDA_VISIBLE_DEVICES" not in environment(job(), place=place)


def test_secrets_come_from_the_users_environment_or_are_an_error() -> None:
    secret: dict[str, Any] = {"secretKeyRef": {"name": "hub", "key": "token"}}
    of = job(env=[{"name": "HF_TOKEN", "valueFrom": secret}])

    with pytest.raises(BadInput, match=r"spec.env: HF_TOKEN: valueFrom needs a cluster; set HF_TOKEN"):
        check_environment(of.spec, {})
    check_environment(of.spec, {"HF_TOKEN": "t"})
    assert environment(of, {"HF_TOKEN": "t"}).items() >= {"HF_TOKEN": "t"}.items()


def test_ports_are_free_and_apart() -> None:
    ports = find_ports(20)

    assert len(set(ports)) == 20
    assert all(1024 <= port < 65536 for port in ports)
