"""What `finetune estimate` makes of a forecast."""

from typing import Any

import pytest

from finetune_cli.errors import BadInput
from finetune_cli.estimate import GIB, estimate, verdict
from finetune_cli.local.volume_mapping import localise_model, parse_volumes
from testing.builders.job_files import job_body, job_file, write_yaml

CLAIM = {"claimName": "models"}
VOLUMES = [{"name": "models", "mountPath": "/models", "persistentVolumeClaim": CLAIM}]


def found(**fields: Any) -> dict[str, Any]:
    sizes = {"rank": {"total": 60 * GIB}, "node": {"total": 20 * GIB}}
    return {"onGpu": True, **sizes, "fitsOn": ["a100-80g", "h200-141g"], **fields}


def gpu(*, fits: bool) -> dict[str, Any]:
    return {"name": "h100-80g", "usable": 80 * GIB if fits else 40 * GIB, "fits": fits}


SUGGESTION = {"changes": ["lora: {}", "training.gradientCheckpointing: true"], "total": 30 * GIB}


@pytest.mark.parametrize(
    ("fields", "line", "good"),
    [
        pytest.param({}, "fits on: a100-80g, h200-141g", True, id="no GPU named"),
        pytest.param({"fitsOn": []}, "fits on: no GPU known; --gpu NAME suggests what to change", True, id="too large"),
        pytest.param({"gpu": gpu(fits=True)}, "h100-80g: fits, 60.0 GiB of 80.0 GiB (75%)", True, id="fits"),
        pytest.param(
            {"gpu": gpu(fits=False), "suggestion": SUGGESTION},
            "h100-80g: does not fit, 60.0 GiB of 40.0 GiB;"
            " 30.0 GiB with lora: {}, training.gradientCheckpointing: true",
            False,
            id="fits when changed",
        ),
        pytest.param(
            {"gpu": gpu(fits=False), "suggestion": None},
            "h100-80g: does not fit, 60.0 GiB of 40.0 GiB; no change of batch, length or method makes it fit",
            False,
            id="never fits",
        ),
    ],
)
def test_a_gpu_is_judged_in_a_line(fields: dict[str, Any], line: str, good: bool) -> None:
    assert verdict(found(**fields), host_limit=None) == [(line, good)]


def test_host_memory_is_held_against_the_limit() -> None:
    enough, less = (verdict(found(onGpu=False), host_limit=limit * GIB) for limit in (32, 16))

    assert enough == [("host memory: 20.0 GiB fits resources.limits.memory of 32.0 GiB", True)]
    assert less == [("host memory: 20.0 GiB does not fit; raise resources.limits.memory of 16.0 GiB", False)]


def test_the_model_is_looked_for_here_and_the_rows_are_not(tmp_path: Any) -> None:
    file = job_file(tmp_path, model={"name": "/models/base"}, volumes=VOLUMES)
    (tmp_path / "base").mkdir()

    spec = localise_model(file, parse_volumes([f"models={tmp_path}"], file.job.spec))

    assert spec["model"]["name"] == str(tmp_path / "base")
    assert spec["dataset"] == file.body["spec"]["dataset"]


def test_a_model_on_a_volume_needs_the_volume(tmp_path: Any) -> None:
    with pytest.raises(BadInput, match="/models/base is on volume models; add --volume models=DIR"):
        localise_model(job_file(tmp_path, model={"name": "/models/base"}, volumes=VOLUMES), ())


def test_what_a_command_needs_is_not_guessed(tmp_path: Any) -> None:
    own: dict[str, Any] = {"command": {"script": "train.py"}, "image": "registry.example/own:v1"}
    body = job_body(**own, model=None, dataset=None, sft=None, lora=None)

    with pytest.raises(BadInput, match=r"spec.command: what a program of your own needs cannot be forecast"):
        estimate(write_yaml(tmp_path, body))
