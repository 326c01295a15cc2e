"""Tests of mapping the volumes and paths of a job to local paths."""

from pathlib import Path
from typing import Any

import pytest

from finetune_cli.errors import BadInput
from finetune_cli.local.volume_mapping import LocalMount, map_job_paths, map_to_local_path, parse_volumes
from testing.builders.job_files import job_file
from testing.builders.jobs import command

DATA_MOUNT, NESTED_MOUNT = (
    LocalMount("/data", Path("/home/me/data")),
    LocalMount("/data/nested", Path("/home/me/nested")),
)


def build_volume(name: str, mount_path: str) -> dict[str, Any]:
    return {"name": name, "mountPath": mount_path, "persistentVolumeClaim": {"claimName": name}}


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        pytest.param("/data/train.jsonl", "/home/me/data/train.jsonl", id="under a mount"),
        pytest.param("/data", "/home/me/data", id="mount path"),
        pytest.param("/data/nested/a", "/home/me/nested/a", id="nested mount"),
        pytest.param("/database/a", None, id="same prefix but another folder"),
        pytest.param("other/a", None, id="a relative path"),
    ],
)
def test_path_is_mapped_by_its_deepest_mount(path: str, expected: str | None) -> None:
    assert map_to_local_path(path, (DATA_MOUNT, NESTED_MOUNT)) == expected


def test_model_and_dataset_paths_are_mapped_to_local_folders(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "train.jsonl").touch()
    (tmp_path / "eval.jsonl").touch()
    dataset = {"train": [{"name": "/data/train.jsonl#50"}], "eval": [{"name": "eval.jsonl"}]}
    file = job_file(tmp_path, dataset=dataset)

    spec = map_job_paths(file, parse_volumes([f"data={tmp_path}"], file.job.spec))["spec"]

    assert spec["model"]["name"] == str(tmp_path / "model")
    assert spec["dataset"]["train"] == [{"name": f"{tmp_path}/train.jsonl#50"}]
    assert spec["dataset"]["eval"] == [{"name": str(tmp_path / "eval.jsonl")}], "relative to the job file"
    assert {**spec, "model": 0, "dataset": 0} == {**file.body["spec"], "model": 0, "dataset": 0}


def test_hub_id_is_not_mapped(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").touch()
    dataset = {"train": [{"name": "train.jsonl"}]}
    file = job_file(tmp_path, model={"name": "Qwen/Qwen2.5-7B-Instruct"}, dataset=dataset)

    assert map_job_paths(file, ())["spec"]["model"]["name"] == "Qwen/Qwen2.5-7B-Instruct"


def test_missing_paths_are_reported_with_their_field_names(tmp_path: Path) -> None:
    file = job_file(tmp_path, dataset={"train": [{"name": "/data/a.jsonl"}, {"name": "b.jsonl"}]})

    with pytest.raises(BadInput) as raised:
        map_job_paths(file, ())

    assert raised.value.problems == (
        f"{file.path}: spec.model.name: /data/model is on volume data; add --volume data=DIR",
        f"{file.path}: spec.dataset.train[0].name: /data/a.jsonl is on volume data; add --volume data=DIR",
        f"{file.path}: spec.dataset.train[1].name: b.jsonl: no such file or folder ({tmp_path}/b.jsonl)",
    )


def test_nested_volume_requires_a_separate_folder(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    file = job_file(
        tmp_path,
        volumes=[build_volume("data", "/data"), build_volume("rows", "/data/rows")],
        dataset={"train": [{"name": "/data/rows/a.jsonl"}]},
    )

    with pytest.raises(BadInput, match="is on volume rows; add --volume rows=DIR"):
        map_job_paths(file, parse_volumes([f"data={tmp_path}"], file.job.spec))


@pytest.mark.parametrize(
    ("option", "expected"),
    [
        pytest.param("data", "--volume data: expected NAME=DIR, such as data=./data", id="no folder"),
        pytest.param("date=.", "--volume date: the job has no such volume; it has data", id="unknown volume"),
        pytest.param("data=absent", "--volume data: absent is not a folder", id="missing folder"),
    ],
)
def test_invalid_volume_option_is_rejected(option: str, expected: str, tmp_path: Path) -> None:
    with pytest.raises(BadInput) as raised:
        parse_volumes([option], job_file(tmp_path).job.spec)

    assert raised.value.problems == (expected,)


def test_working_directory_and_path_arguments_of_a_command_are_mapped(tmp_path: Path) -> None:
    (tmp_path / "code").mkdir()
    program = {"script": "/data/train.py", "args": ["--rows", "/data/rows", "--lr=1"], "workingDir": "code"}
    file = job_file(tmp_path, **command(program))

    spec = map_job_paths(file, (LocalMount("/data", tmp_path),))["spec"]

    assert spec["command"] == {
        "script": str(tmp_path / "train.py"),
        "args": ["--rows", str(tmp_path / "rows"), "--lr=1"],
        "workingDir": str(tmp_path / "code"),
    }


def test_default_working_directory_is_the_folder_of_the_job_file(tmp_path: Path) -> None:
    file = job_file(tmp_path, **command({"exec": ["swift", "sft"]}))

    assert map_job_paths(file, ())["spec"]["command"] == {"exec": ["swift", "sft"], "workingDir": str(tmp_path)}


def test_missing_working_directory_is_rejected(tmp_path: Path) -> None:
    file = job_file(tmp_path, **command({"script": "a.py", "workingDir": "/workspace/none"}))

    with pytest.raises(BadInput, match=r"spec\.command\.workingDir: /workspace/none: no such file or folder"):
        map_job_paths(file, ())


def test_adapter_path_is_mapped(tmp_path: Path) -> None:
    (tmp_path / "adapter").mkdir()
    (tmp_path / "train.jsonl").touch()
    file = job_file(tmp_path, model={"name": "acme/model"}, lora={"adapter": "/data/adapter"})

    spec = map_job_paths(file, (LocalMount("/data", tmp_path),))["spec"]

    assert spec["lora"] == {"adapter": str(tmp_path / "adapter")}
