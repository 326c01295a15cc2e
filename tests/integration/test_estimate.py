"""Tests of `finetune estimate`, which forecasts memory in a trainer process."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from testing.builders.job_files import job_body, write_yaml
from testing.models import tiny_vision
from testing.processes.forks.fork_server import use_forks

QWEN_7B = {
    "model_type": "qwen2",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
ROWS = {"train": [{"name": "/data/train.jsonl"}], "maxLength": 2048}


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    """Create a model folder that contains only the config."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(QWEN_7B))
    return folder


def run_estimate(folder: Path, *flags: str, **fields: Any) -> "subprocess.CompletedProcess[str]":
    defaults = {"dataset": ROWS, "numNodes": 1, "nprocPerNode": None, "resources": {"limits": {"nvidia.com/gpu": 4}}}
    file = write_yaml(folder, job_body(**{**defaults, **fields}))
    return subprocess.run(
        [sys.executable, "-m", "finetune_cli", "estimate", str(file), *flags],
        env=use_forks({**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def test_estimate_exits_with_zero_if_the_job_fits(tmp_path: Path, model_folder: Path) -> None:
    training = {"perDeviceTrainBatchSize": "auto", "globalBatchSize": 4}

    process = run_estimate(
        tmp_path, "--gpu", "a100-40g", model={"name": str(model_folder)}, lora={"r": 8}, training=training
    )

    assert process.returncode == 0, process.stderr
    assert "parameters 7,635,801,600, of which 20,185,088 are trained" in process.stdout
    assert "batch 1 x 1 x 4 = 4 (per device x accumulation x ranks), samples of up to 2048 tokens" in process.stdout
    assert "perDeviceTrainBatchSize auto: 1 is the most that fits\n" in process.stdout
    assert re.search(r"^weights +14\.19$", process.stdout, re.MULTILINE)
    assert "a100-40g: fits, " in process.stdout


def test_changes_are_suggested_for_a_job_that_does_not_fit(tmp_path: Path, model_folder: Path) -> None:
    training = {"perDeviceTrainBatchSize": 8, "gradientAccumulationSteps": 1, "gradientCheckpointing": True}

    process = run_estimate(tmp_path, "--gpu", "l4-24g", model={"name": str(model_folder)}, lora={}, training=training)

    assert process.returncode == 1, process.stderr
    assert "l4-24g: does not fit" in process.stdout
    changes = "with training.perDeviceTrainBatchSize: 4, training.gradientAccumulationSteps: 2\n"
    assert process.stdout.endswith(changes), process.stdout


def test_job_with_the_suggested_changes_fits(tmp_path: Path, model_folder: Path) -> None:
    training = {"perDeviceTrainBatchSize": 4, "gradientAccumulationSteps": 2, "gradientCheckpointing": True}

    process = run_estimate(tmp_path, "--gpu", "l4-24g", model={"name": str(model_folder)}, lora={}, training=training)

    assert process.returncode == 0, process.stdout


@pytest.mark.parametrize(
    ("flags", "fields", "message"),
    [
        pytest.param(["--gpu", "h1000"], {}, "--gpu h1000: unknown GPU; expected one of t4-16g, ", id="gpu"),
        pytest.param([], {"lora": {"targetModules": ["query"]}}, "query matches no module of the model", id="target"),
        pytest.param([], {"model": {"name": "./gone"}}, "spec.model.name: ./gone: no such file or folder", id="model"),
    ],
)
def test_user_error_is_reported_in_one_line(
    tmp_path: Path, model_folder: Path, flags: list[str], fields: dict[str, Any], message: str
) -> None:
    process = run_estimate(tmp_path, *flags, **{"model": {"name": str(model_folder)}, **fields})

    assert process.returncode == 2
    assert message in process.stderr
    assert len(process.stderr.splitlines()) == 1


def test_job_without_gpus_needs_only_host_memory(tmp_path: Path, model_folder: Path) -> None:
    limits = {"limits": {"memory": "48Gi"}}

    process = run_estimate(tmp_path, model={"name": str(model_folder)}, nprocPerNode=2, resources=limits)

    assert process.returncode == 1, process.stderr
    assert "each rank, in host memory" in process.stdout
    assert "does not fit; raise resources.limits.memory of 48.0 GiB" in process.stdout


def test_forecast_of_a_vision_language_model_includes_an_image(tmp_path: Path) -> None:
    folder = tiny_vision.build(tmp_path / "vision-language", "qwen2_vl")
    rows = {**ROWS, "maxLength": 256}

    processes = {
        pixels: run_estimate(
            tmp_path, "--gpu", "l4-24g", model={"name": str(folder), "maxPixels": pixels}, dataset=rows
        )
        for pixels in (50_000, 150_000)
    }

    assert [each.returncode for each in processes.values()] == [0, 0], processes
    small, large = (re.search(r"^activations +([\d.]+)$", each.stdout, re.MULTILINE) for each in processes.values())
    assert small is not None
    assert large is not None
    assert float(small[1]) <= float(large[1])
    assert "samples of up to 256 tokens" in processes[50_000].stdout


def test_sharded_job_lists_gpu_and_host_memory(tmp_path: Path, model_folder: Path) -> None:
    sharding = {"lora": None, "deepspeed": {"preset": "zero3_offload"}}

    process = run_estimate(tmp_path, "--gpu", "l40s-48g", model={"name": str(model_folder)}, **sharding)

    assert process.returncode == 0, process.stderr
    rank, node = process.stdout.split("each node, in host memory")
    assert "gathered weights" in rank
    assert "optimizer states" not in rank
    assert "offloaded" in node
