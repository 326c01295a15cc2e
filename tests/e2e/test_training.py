"""Tests of SFT, DPO and vision-language training on a real cluster with two pods."""

import json
import math
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from testing.cluster.images.oci import write_single_layer_image
from testing.long_tests import mark_long
from testing.models import tiny_vision
from testing.models.loss_curve import read_losses
from testing.models.tool_templates import QWEN_3
from testing.processes.cluster_training import build_training_fields, train_in_one_process
from testing.processes.operator_stack import OperatorInstallation, has_condition, run

pytestmark = pytest.mark.cluster

DATA_IMAGE = "localhost/tiny-model-and-data:1"
HELD_OUT_LOSS_SCRIPT = Path(__file__).parents[2] / "testing" / "models" / "held_out_loss.py"


@pytest.mark.versions
def test_training_on_two_nodes_improves_the_model_and_equals_single_process_training(
    deployment: OperatorInstallation, start_job: Callable[..., str], tmp_path: Path
) -> None:
    training_fields = build_training_fields(max_steps=40, save_steps=20, learningRate=0.01)
    job = start_job(training=training_fields)
    finished = deployment.wait_until_finished(job)

    assert has_condition(finished, "Complete"), finished["status"]
    status = finished["status"]
    assert status["batch"]["effective"] == 8
    assert status["progress"]["step"] == 40
    assert {node["k8sNode"] for node in status["nodes"]} != {""}

    base, adapted = compute_held_out_losses(deployment, job)
    assert adapted < base - 0.1, (base, adapted)

    single = train_in_one_process(deployment, training_fields, tmp_path)
    distributed = read_losses(deployment.get_output_folder(job))
    assert list(single) == list(distributed) == list(range(1, 41))
    assert all(abs(single[step] - distributed[step]) < 5e-4 for step in distributed), (single, distributed)


@pytest.mark.long("takes a minute; integration compares both with one process")
@pytest.mark.parametrize("sharding", [{"deepspeed": {"preset": "zero2"}}, {"fsdp": {}}], ids=["zero2", "fsdp2"])
def test_sharded_dpo_of_all_weights_on_two_nodes_equals_single_process_training(
    deployment: OperatorInstallation, start_job: Callable[..., str], tmp_path: Path, sharding: dict[str, Any]
) -> None:
    training_fields = build_training_fields(max_steps=8, learningRate=0.002)
    dataset = {"train": [{"name": "/data/train.pairs.jsonl"}]}
    fields = {"sft": None, "dpo": {}, "lora": None, "dataset": dataset}
    job = start_job(training=training_fields, **fields, **sharding)
    finished = deployment.wait_until_finished(job)

    assert has_condition(finished, "Complete"), finished["status"]
    single = train_in_one_process(deployment, training_fields, tmp_path, **fields)
    distributed = read_losses(deployment.get_output_folder(job))
    assert list(single) == list(distributed) == list(range(1, 9))
    assert all(abs(single[step] - distributed[step]) < 5e-4 for step in distributed), (single, distributed)
    assert distributed[1] == pytest.approx(math.log(2), abs=1e-4)
    assert distributed[8] < distributed[1] - 0.05


def test_model_and_data_are_read_from_the_files_of_an_image(
    deployment: OperatorInstallation, start_job: Callable[..., str], tmp_path: Path
) -> None:
    data = deployment.get_claim_folder("datasets")
    paths = [data / "train.jsonl", *(path for path in (data / "model").rglob("*") if path.is_file())]
    files = {str(path.relative_to(data)): path.read_bytes() for path in paths}
    write_single_layer_image(tmp_path / "data.tar", name=DATA_IMAGE, files=files, entrypoint=())
    deployment.provider.load_image(tmp_path / "data.tar")

    volume = {"name": "data", "mountPath": "/data", "image": {"reference": DATA_IMAGE, "pullPolicy": "Never"}}
    job = start_job(numNodes=1, nprocPerNode=1, volumes=[volume], training=build_training_fields(max_steps=4))

    finished = deployment.wait_until_finished(job)
    assert has_condition(finished, "Complete"), finished["status"]
    assert list(read_losses(deployment.get_output_folder(job))) == [1, 2, 3, 4]


@pytest.mark.long("the cluster does not depend on the rows, which tests of the trainer cover")
def test_tool_calls_with_reasoning_are_trained_on_two_nodes(
    deployment: OperatorInstallation, start_job: Callable[..., str]
) -> None:
    data = deployment.get_claim_folder("datasets")
    write_tool_data_set(data / "tools", model=data / "model")
    rows = {"train": [{"name": "/data/tools/rows.jsonl"}], "chatTemplateKwargs": {"enable_thinking": True}}
    job = start_job(
        model={"name": "/data/tools/model"}, dataset=rows, training=build_training_fields(max_steps=8), nprocPerNode=1
    )
    finished = deployment.wait_until_finished(job)

    assert has_condition(finished, "Complete"), finished["status"]
    losses = read_losses(deployment.get_output_folder(job))
    assert losses[8] < losses[1] - 0.1, losses


@pytest.mark.parametrize(
    "model_type", mark_long(["llava", "qwen3_5"], ["llava"], "resembles qwen3_5; integration trains both")
)
def test_vision_language_model_trains_on_two_nodes_with_batches_without_images(
    deployment: OperatorInstallation, start_job: Callable[..., str], model_type: str
) -> None:
    """Only two of three rows have images, so that some micro-batches have none."""
    data = deployment.get_claim_folder("datasets")
    if not (data / model_type).exists():
        tiny_vision.build(data / model_type, model_type)
        tiny_vision.write_rows(data / "vision", 24, images=lambda number: number % 3)
        run(["chmod", "-R", "a+rX", str(data)])
    rows = {"train": [{"name": "/data/vision/rows.jsonl"}]}
    training_fields = {"globalBatchSize": 8, "learningRate": 0.01, "maxSteps": 4}
    job = start_job(model={"name": f"/data/{model_type}"}, dataset=rows, training=training_fields, nprocPerNode=1)
    finished = deployment.wait_until_finished(job)

    assert has_condition(finished, "Complete"), finished["status"]
    assert finished["status"]["batch"]["worldSize"] == 2
    losses = read_losses(deployment.get_output_folder(job))
    assert list(losses) == [1, 2, 3, 4]
    assert losses[4] < losses[1]
    assert (deployment.get_output_folder(job) / "result" / "preprocessor_config.json").is_file()


def write_tool_data_set(folder: Path, *, model: Path) -> None:
    """Write a copy of the model with a chat template like that of Qwen3, and conversations with tool calls."""
    shutil.copytree(model, folder / "model", dirs_exist_ok=True)
    (folder / "model" / "chat_template.jinja").write_text(QWEN_3)
    parameters = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    function = {"name": "get_weather", "description": "Return the weather of a city.", "parameters": parameters}
    rows = []
    for number in range(24):
        city = f"city {number}"
        call = {"id": "1", "type": "function", "function": {"name": "get_weather", "arguments": {"city": city}}}
        messages = [
            {"role": "user", "content": f"How is the weather in {city}?"},
            {"role": "assistant", "content": "", "reasoning_content": f"I look up {city}.", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "1", "content": f"{number} degrees"},
            {"role": "assistant", "reasoning_content": "That is the answer.", "content": f"It is {number} degrees."},
        ]
        rows.append({"messages": messages, "tools": [{"type": "function", "function": function}]})
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run(["chmod", "-R", "a+rX", str(folder)])


def compute_held_out_losses(deployment: OperatorInstallation, job: str) -> tuple[float, float]:
    """Return the evaluation loss without and with the adapter, computed only with transformers and peft."""
    data = deployment.get_claim_folder("datasets")
    command = [
        sys.executable,
        str(HELD_OUT_LOSS_SCRIPT),
        str(data / "model"),
        str(deployment.get_output_folder(job) / "result"),
        str(data / "eval.jsonl"),
    ]
    losses = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1])
    return losses["base"], losses["adapted"]
