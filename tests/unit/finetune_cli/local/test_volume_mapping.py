"""Where volumes and paths of a job lie on this machine."""

from pathlib import Path
from typing import Any

import pytest

from finetune_cli.errors import BadInput
from finetune_cli.local.volume_mapping import Mount, localise, parse_volumes, to_local
from testing.builders.job_files import job_file
from testing.builders.jobs import command

DATA, DEEP = Mount("/data", Path("/home/me/data")), Mount("/data/deep", Path("/home/me/deep"))


def volume(name: str, mount_path: str) -> dict[str, Any]:
    return {"name": name, "mountPath": mount_path, "persistentVolumeClaim": {"claimName": name}}


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        pytest.param("/data/train.jsonl", "/home/me/data/train.jsonl", id="under a mount"),
        pytest.param("/data", "/home/me/data", id="the mount itself"),
        pytest.param("/data/deep/a", "/home/me/deep/a", id="the deepest mount wins"),
        pytest.param("/database/a", None, id="a name that only begins alike"),
        pytest.param("other/a", None, id="a relative path"),
    ],
)
def test_a_path_is_found_by_its_mount(path: str, expected: str | None) -> None:
    assert to_local(path, (DATA, DEEP)) == expected


def test_model_and_rows_are_rewritten_to_the_folders_of_their_volumes(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "train.jsonl").touch()
    (tmp_path / "eval.jsonl").touch()
    dataset = {"train": [{"name": "/data/train.jsonl#50"}], "eval": [{"name": "eval.jsonl"}]}
    file = job_file(tmp_path, dataset=dataset)

    spec = localise(file, parse_volumes([f"data={tmp_path}"], file.job.spec))["spec"]

    assert spec["model"]["name"] == str(tmp_path / "model")
    assert spec["dataset"]["train"] == [{"name": f"{tmp_path}/train.jsonl#50"}]
    assert spec["dataset"]["eval"] == [{"name": str(tmp_path / "eval.jsonl")}], "relative to the job file"
    assert {**spec, "model": 0, "dataset": 0} == {**file.body["spec"], "model": 0, "dataset": 0}


def test_a_hub_id_stays_one(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").touch()
    dataset = {"train": [{"name": "train.jsonl"}]}
    file = job_file(tmp_path, model={"name": "Qwen/Qwen2.5-7B-Instruct"}, dataset=dataset)

    assert localise(file, ())["spec"]["model"]["name"] == "Qwen/Qwen2.5-7B-Instruct"


def test_what_cannot_be_found_is_named_with_its_field(tmp_path: Path) -> None:
    file = job_file(tmp_path, dataset={"train": [{"name": "/data/a.jsonl"}, {"name": "b.jsonl"}]})

    with pytest.raises(BadInput) as refused:
        localise(file, ())

    assert refused.value.problems == (
        f"{file.path}: spec.model.name: /data/model is on volume data; add --volume data=DIR",
        f"{file.path}: spec.dataset.train[0].name: /data/a.jsonl is on volume data; add --volume data=DIR",
        f"{file.path}: spec.dataset.train[1].name: b.jsonl: no such file or folder ({tmp_path}/b.jsonl)",
    )


def test_a_volume_inside_another_needs_its_own_folder(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    file = job_file(
        tmp_path,
        volumes=[volume("data", "/data"), volume("rows", "/data/rows")],
        dataset={"train": [{"name": "/data/rows/a.jsonl"}]},
    )

    with pytest.raises(BadInput, match="is on volume rows; add --volume rows=DIR"):
        localise(file, parse_volumes([f"data={tmp_path}"], file.job.spec))


@pytest.mark.parametrize(
    ("option", "expected"),
    [
        pytest.param("data", "--volume data: expected NAME=DIR, such as data=./data", id="no folder"),
        pytest.param("date=.", "--volume date: the job has no such volume; it has data", id="unknown volume"),
        pytest.param("data=absent", "--volume data: absent is no folder", id="folder that is not there"),
    ],
)
def test_a_volume_option_that_cannot_be_used_is_refused(option: str, expected: str, tmp_path: Path) -> None:
    with pytest.raises(BadInput) as refused:
        parse_volumes([option], job_file(tmp_path).job.spec)

    assert refused.value.problems == (expected,)


def test_a_commands_folder_and_its_words_that_are_paths_are_rewritten(tmp_path: Path) -> None:
    (tmp_path / "code").mkdir()
    asked = {"script": "/data/train.py", "args": ["--rows", "/data/rows", "--lr=1"], "workingDir": "code"}
    file = job_file(tmp_path, **command(asked))

    spec = localise(file, (Mount("/data", tmp_path),))["spec"]

    assert spec["command"] == {
        "script": str(tmp_path / "train.py"),
        "args": ["--rows", str(tmp_path / "rows"), "--lr=1"],
        "workingDir": str(tmp_path / "code"),
    }


def test_a_command_starts_beside_the_job_file_unless_told_otherwise(tmp_path: Path) -> None:
    file = job_file(tmp_path, **command({"exec": ["swift", "sft"]}))

    assert localise(file, ())["spec"]["command"] == {"exec": ["swift", "sft"], "workingDir": str(tmp_path)}


def test_a_folder_of_the_image_has_to_be_found_here(tmp_path: Path) -> None:
    file = job_file(tmp_path, **command({"script": "a.py", "workingDir": "/workspace/none"}))

    with pytest.raises(BadInput, match=r"spec\.command\.workingDir: /workspace/none: no such file or folder"):
        localise(file, ())


def test_the_adapter_that_a_job_goes_on_from_is_found_as_its_model_is(tmp_path: Path) -> None:
    (tmp_path / "adapter").mkdir()
    (tmp_path / "train.jsonl").touch()
    file = job_file(tmp_path, model={"name": "acme/model"}, lora={"adapter": "/data/adapter"})

    spec = localise(file, (Mount("/data", tmp_path),))["spec"]

    assert spec["lora"] == {"adapter": str(tmp_path / "adapter")}
