"""The main job on a real cluster: two pods of two ranks train a LoRA adapter that plain peft can load."""

import json
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from testing.models import tiny_vision
from testing.models.loss_curve import read_losses
from testing.processes.cluster_training import training
from testing.processes.operator_stack import Stack, condition, example_job, run

pytestmark = pytest.mark.cluster

HELD_OUT = Path(__file__).parents[2] / "testing" / "models" / "held_out_loss.py"


def test_two_nodes_train_an_adapter_that_is_better_than_the_base_model_and_equal_to_one_process(
    stack: Stack, start: Callable[..., str], tmp_path: Path
) -> None:
    settings = training(max_steps=40, save_steps=20, learningRate=0.01)
    job = start(training=settings)
    finished = stack.wait_finished(job)

    assert condition(finished, "Complete"), finished["status"]
    status = finished["status"]
    assert status["batch"]["effective"] == 8
    assert status["progress"]["step"] == 40
    assert {node["k8sNode"] for node in status["nodes"]} != {""}

    base, adapted = held_out_losses(stack, job)
    assert adapted < base - 0.1, (base, adapted)

    alone = run_in_one_process(stack, settings, tmp_path)
    together = read_losses(stack.output(job))
    assert list(alone) == list(together) == list(range(1, 41))
    assert all(abs(alone[step] - together[step]) < 5e-4 for step in together), (alone, together)


def test_two_nodes_learn_preferences(stack: Stack, start: Callable[..., str]) -> None:
    data = {"train": [{"name": "/data/train.pairs.jsonl"}], "eval": [{"name": "/data/eval.pairs.jsonl"}]}
    job = start(sft=None, dpo={}, dataset=data, training=training(max_steps=20, evalSteps=20, learningRate=0.005))
    finished = stack.wait_finished(job)

    assert condition(finished, "Complete"), finished["status"]
    losses = read_losses(stack.output(job))
    assert abs(losses[1] - math.log(2)) < 1e-4
    assert losses[20] < losses[1] - 0.05, losses


def test_two_nodes_learn_what_images_show(stack: Stack, start: Callable[..., str]) -> None:
    """LLaVA, with images in two of three rows, so that now and then a node shows none."""
    data = stack.folder("datasets")
    if not (data / "seen").exists():
        tiny_vision.build(data / "llava", "llava")
        tiny_vision.rows(data / "seen", 24, images=lambda number: number % 3)
        run(["chmod", "-R", "a+rX", str(data)])
    rows = {"train": [{"name": "/data/seen/rows.jsonl"}]}
    settings = {"globalBatchSize": 8, "learningRate": 0.01, "maxSteps": 4}
    job = start(model={"name": "/data/llava"}, dataset=rows, training=settings, nprocPerNode=1)
    finished = stack.wait_finished(job)

    assert condition(finished, "Complete"), finished["status"]
    assert finished["status"]["batch"]["worldSize"] == 2
    losses = read_losses(stack.output(job))
    assert list(losses) == [1, 2, 3, 4]
    assert losses[4] < losses[1]
    assert (stack.output(job) / "result" / "preprocessor_config.json").is_file()


def held_out_losses(stack: Stack, job: str) -> tuple[float, float]:
    """Loss on eval rows without and with the adapter, in a process that knows nothing but transformers and peft."""
    data = stack.folder("datasets")
    command = [
        sys.executable,
        str(HELD_OUT),
        str(data / "model"),
        str(stack.output(job) / "result"),
        str(data / "eval.jsonl"),
    ]
    found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1])
    return found["base"], found["adapted"]


def run_in_one_process(stack: Stack, settings: dict[str, object], folder: Path) -> dict[int, float]:
    """The same spec on one node of one rank, in local mode: the same effective batch, made by accumulation."""
    body = example_job("alone", numNodes=1, nprocPerNode=1, training=settings)
    job_file = folder / "job.yaml"
    job_file.write_text(yaml.safe_dump(body))
    command = [sys.executable, "-m", "finetune_cli", "run", str(job_file), "--output", str(folder / "out")]
    subprocess.run([*command, "--volume", f"data={stack.folder('datasets')}"], check=True)
    (output,) = (folder / "out").glob("*/alone")
    return read_losses(output)
