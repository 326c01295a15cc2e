"""Tests of the verdict and the path mapping of `finetune estimate`."""

from typing import Any

import pytest

from finetune_cli.errors import BadInput
from finetune_cli.estimate import GIB, estimate, format_verdicts
from finetune_cli.local.volume_mapping import map_model_path, parse_volumes
from testing.builders.job_files import job_body, job_file, write_yaml

CLAIM = {"claimName": "models"}
VOLUMES = [{"name": "models", "mountPath": "/models", "persistentVolumeClaim": CLAIM}]


def build_forecast(**fields: Any) -> dict[str, Any]:
    sizes = {"rank": {"total": 60 * GIB}, "node": {"total": 20 * GIB}}
    return {"onGpu": True, **sizes, "fitsOn": ["a100-80g", "h200-141g"], **fields}


def build_gpu_forecast(*, fits: bool) -> dict[str, Any]:
    return {"name": "h100-80g", "usable": 80 * GIB if fits else 40 * GIB, "fits": fits}


SUGGESTION = {"changes": ["lora: {}", "training.gradientCheckpointing: true"], "total": 30 * GIB}


@pytest.mark.parametrize(
    ("fields", "line", "fits"),
    [
        pytest.param({}, "fits on: a100-80g, h200-141g", True, id="without --gpu"),
        pytest.param(
            {"fitsOn": []}, "fits on: no GPU known; --gpu NAME suggests what to change", True, id="fits on no known GPU"
        ),
        pytest.param(
            {"gpu": build_gpu_forecast(fits=True)}, "h100-80g: fits, 60.0 GiB of 80.0 GiB (75%)", True, id="fits"
        ),
        pytest.param(
            {"gpu": build_gpu_forecast(fits=False), "suggestion": SUGGESTION},
            "h100-80g: does not fit, 60.0 GiB of 40.0 GiB;"
            " 30.0 GiB with lora: {}, training.gradientCheckpointing: true",
            False,
            id="fits with changes",
        ),
        pytest.param(
            {"gpu": build_gpu_forecast(fits=False), "suggestion": None},
            "h100-80g: does not fit, 60.0 GiB of 40.0 GiB; no change of batch, length or method makes it fit",
            False,
            id="never fits",
        ),
    ],
)
def test_gpu_verdict_is_one_line(fields: dict[str, Any], line: str, fits: bool) -> None:
    assert format_verdicts(build_forecast(**fields), host_limit_bytes=None) == [(line, fits)]


def test_host_memory_is_compared_with_the_memory_limit() -> None:
    fitting_verdict, failing_verdict = (
        format_verdicts(build_forecast(onGpu=False), host_limit_bytes=limit * GIB) for limit in (32, 16)
    )

    assert fitting_verdict == [("host memory: 20.0 GiB fits resources.limits.memory of 32.0 GiB", True)]
    assert failing_verdict == [("host memory: 20.0 GiB does not fit; raise resources.limits.memory of 16.0 GiB", False)]


def test_model_path_is_mapped_but_dataset_paths_are_not(tmp_path: Any) -> None:
    file = job_file(tmp_path, model={"name": "/models/base"}, volumes=VOLUMES)
    (tmp_path / "base").mkdir()

    spec = map_model_path(file, parse_volumes([f"models={tmp_path}"], file.job.spec))

    assert spec["model"]["name"] == str(tmp_path / "base")
    assert spec["dataset"] == file.body["spec"]["dataset"]


def test_estimate_of_a_command_is_rejected(tmp_path: Any) -> None:
    fields: dict[str, Any] = {"command": {"script": "train.py"}, "image": "registry.example/own:v1"}
    body = job_body(**fields, model=None, dataset=None, sft=None, lora=None)

    with pytest.raises(BadInput, match=r"spec.command: the memory of a custom program cannot be forecast"):
        estimate(write_yaml(tmp_path, body))
