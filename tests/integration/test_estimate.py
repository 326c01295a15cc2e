"""`finetune estimate` as its user starts it: a forecast by the trainer in a process of its own."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from testing.builders.job_files import job_body, write_yaml
from testing.models import tiny_vision

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
def model(tmp_path: Path) -> Path:
    """A config and nothing else."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(QWEN_7B))
    return folder


def estimate(folder: Path, *flags: str, **fields: Any) -> "subprocess.CompletedProcess[str]":
    given = {"dataset": ROWS, "numNodes": 1, "nprocPerNode": None, "resources": {"limits": {"nvidia.com/gpu": 4}}}
    file = write_yaml(folder, job_body(**{**given, **fields}))
    return subprocess.run(
        [sys.executable, "-m", "finetune_cli", "estimate", str(file), *flags],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def test_a_job_that_fits(tmp_path: Path, model: Path) -> None:
    training = {"perDeviceTrainBatchSize": "auto", "globalBatchSize": 4}

    said = estimate(tmp_path, "--gpu", "a100-40g", model={"name": str(model)}, lora={"r": 8}, training=training)

    assert said.returncode == 0, said.stderr
    assert "parameters 7,635,801,600, of which 20,185,088 are trained" in said.stdout
    assert "batch 1 x 1 x 4 = 4 (per device x accumulation x ranks), samples of up to 2048 tokens" in said.stdout
    assert "perDeviceTrainBatchSize auto: 1 is the most that fits\n" in said.stdout
    assert re.search(r"^weights +14\.19$", said.stdout, re.MULTILINE)
    assert "a100-40g: fits, " in said.stdout


def test_a_job_that_does_not_fit_is_told_what_would(tmp_path: Path, model: Path) -> None:
    training = {"perDeviceTrainBatchSize": 4, "gradientAccumulationSteps": 2, "gradientCheckpointing": True}

    said = estimate(tmp_path, "--gpu", "l4-24g", model={"name": str(model)}, lora={}, training=training)

    assert said.returncode == 1, said.stderr
    assert "l4-24g: does not fit" in said.stdout
    changes = "with training.perDeviceTrainBatchSize: 1, training.gradientAccumulationSteps: 8\n"
    assert said.stdout.endswith(changes), said.stdout


def test_what_is_suggested_fits(tmp_path: Path, model: Path) -> None:
    training = {"perDeviceTrainBatchSize": 1, "gradientAccumulationSteps": 8, "gradientCheckpointing": True}

    said = estimate(tmp_path, "--gpu", "l4-24g", model={"name": str(model)}, lora={}, training=training)

    assert said.returncode == 0, said.stdout


@pytest.mark.parametrize(
    ("flags", "fields", "words"),
    [
        pytest.param(["--gpu", "h1000"], {}, "--gpu h1000: no GPU is known by that name; known are t4-16g, ", id="gpu"),
        pytest.param([], {"lora": {"targetModules": ["query"]}}, "query matches no module of the model", id="target"),
        pytest.param([], {"model": {"name": "./gone"}}, "spec.model.name: ./gone: no such file or folder", id="model"),
    ],
)
def test_what_the_user_must_change_is_one_line(
    tmp_path: Path, model: Path, flags: list[str], fields: dict[str, Any], words: str
) -> None:
    said = estimate(tmp_path, *flags, **{"model": {"name": str(model)}, **fields})

    assert said.returncode == 2
    assert words in said.stderr
    assert len(said.stderr.splitlines()) == 1


def test_on_cpu_everything_is_host_memory(tmp_path: Path, model: Path) -> None:
    limits = {"limits": {"memory": "64Gi"}}

    said = estimate(tmp_path, model={"name": str(model)}, nprocPerNode=2, resources=limits)

    assert said.returncode == 1, said.stderr
    assert "each rank, in host memory" in said.stdout
    assert "does not fit; raise resources.limits.memory of 64.0 GiB" in said.stdout


def test_a_model_that_sees_is_shown_an_image(tmp_path: Path) -> None:
    folder = tiny_vision.build(tmp_path / "seeing", "qwen2_vl")
    rows = {**ROWS, "maxLength": 256}

    said = {
        pixels: estimate(tmp_path, "--gpu", "l4-24g", model={"name": str(folder), "maxPixels": pixels}, dataset=rows)
        for pixels in (50_000, 150_000)
    }

    assert [each.returncode for each in said.values()] == [0, 0], said
    small, large = (re.search(r"^activations +([\d.]+)$", each.stdout, re.MULTILINE) for each in said.values())
    assert small is not None
    assert large is not None
    assert float(small[1]) <= float(large[1])
    assert "samples of up to 256 tokens" in said[50_000].stdout


def test_memory_that_is_spread_says_what_is_where(tmp_path: Path, model: Path) -> None:
    spread = {"lora": None, "deepspeed": {"preset": "zero3_offload"}}

    said = estimate(tmp_path, "--gpu", "l40s-48g", model={"name": str(model)}, **spread)

    assert said.returncode == 0, said.stderr
    rank, node = said.stdout.split("each node, in host memory")
    assert "gathered weights" in rank
    assert "optimizer states" not in rank
    assert "offloaded" in node
