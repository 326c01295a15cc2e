"""Tests that losses, gradient norms and rewards of SFT and DPO equal those of TRL to four digits in every step."""

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from finetune_api.v1alpha1.lora import Lora
from finetune_trainer.model.lora import add_adapters
from testing.models import tiny_text
from testing.processes.launches import Results, run_cells
from testing.processes.supervisors import REPOSITORY

pytestmark = pytest.mark.slow

ROWS = 12
STEPS = 4
FOUR_DIGITS = 1e-4
METRICS = ("rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies")
METHODS: dict[str, dict[str, Any]] = {
    "sft": {"sft": {}},
    "sigmoid": {"dpo": {"beta": 0.1}},
    "sigmoid with sft": {"dpo": {"beta": 0.2, "rpoAlpha": 0.5}},
    "ipo": {"dpo": {"beta": 0.3, "lossType": "ipo"}},
    "hinge": {"dpo": {"lossType": "hinge"}},
    "robust": {"dpo": {"lossType": "robust", "labelSmoothing": 0.2}},
}
FROM_ADAPTER = "sigmoid from an adapter, lora"  # the initial policy differs from the reference model
CELLS = [*(f"{method}, {tuner}" for method in METHODS for tuner in ("lora", "full")), FROM_ADAPTER]


def to_plain_text(row: tiny_text.Row) -> tiny_text.Row:
    """Convert a row to prompt, chosen and rejected text, which both trainers tokenize without a chat template."""
    pair = tiny_text.convert_to_preference(row)
    question, answer = (message["content"] for message in row["messages"])
    return {"prompt": question, "chosen": f" {answer}", "rejected": f" {pair['rejected_response']}"}


@pytest.fixture(scope="module")
def specs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Build specs with all rows in one micro-batch per step, for both trainers."""
    folder = tmp_path_factory.mktemp("tiny")
    files = tiny_text.build(folder, rows=20, eval_rows=2)
    completions, preferences = folder / "completions.jsonl", folder / "preferences.jsonl"
    pairs = [to_plain_text(row) for row in itertools.islice(tiny_text.generate_chat_rows(), ROWS)]
    tiny_text.write_jsonl(preferences, pairs)
    tiny_text.write_jsonl(completions, [{"prompt": pair["prompt"], "completion": pair["chosen"]} for pair in pairs])
    training = {
        "perDeviceTrainBatchSize": ROWS,
        "maxSteps": STEPS,
        "lrSchedulerType": "constant",
        "saveSteps": 1000,
        "maxGradNorm": 0.5,
    }
    cells = {
        f"{name}, {tuner}": {
            "model": {"name": str(files.model)},
            "dataset": {"train": [{"name": str(completions if name == "sft" else preferences)}], "numWorkers": 0},
            **method,
            **({"lora": {"r": 4}} if tuner == "lora" else {}),
            "training": {**training, "learningRate": 0.01 if tuner == "lora" else 0.001},
            "output": {"persistentVolumeClaim": {"claimName": "unused"}},
        }
        for name, method in METHODS.items()
        for tuner in ("lora", "full")
    }
    adapter = save_trained_adapter(files.model, folder / "adapter")
    return {**cells, FROM_ADAPTER: {**cells["sigmoid, lora"], "lora": {"adapter": str(adapter)}}}


def save_trained_adapter(model: Path, folder: Path) -> Path:
    """Save an adapter with random instead of zero B matrices, like a trained adapter."""
    adapted: Any = add_adapters(AutoModelForCausalLM.from_pretrained(model), Lora(r=4), seed=1)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.02)
    adapted.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def finetune_trainer_results(specs: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Results:
    return run_cells(tmp_path_factory.mktemp("finetune_trainer_results") / "cells", specs, ranks=1)


@pytest.fixture(scope="module")
def trl_results(specs: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Results:
    folder = tmp_path_factory.mktemp("trl_results")
    (folder / "cells.json").write_text(json.dumps(specs))
    path = os.pathsep.join(str(REPOSITORY / part) for part in ("operator", "trainer", ""))
    command = (sys.executable, str(REPOSITORY / "testing/processes/trl_oracle.py"), "cells.json", "results.json")
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    process = subprocess.run(command, cwd=folder, env=environment, capture_output=True, timeout=240)
    assert process.returncode == 0, process.stderr.decode()[-30_000:]
    results: Results = json.loads((folder / "results.json").read_text())
    return results


@pytest.mark.parametrize("run_name", CELLS)
def test_losses_and_gradient_norms_equal_those_of_trl(
    finetune_trainer_results: Results, trl_results: Results, run_name: str
) -> None:
    assert len(finetune_trainer_results[run_name]["loss"]) == STEPS
    for metric in ("loss", "grad_norm"):
        assert finetune_trainer_results[run_name][metric] == pytest.approx(
            trl_results[run_name][metric], rel=FOUR_DIGITS
        ), metric


@pytest.mark.parametrize("run_name", [run_name for run_name in CELLS if not run_name.startswith("sft")])
def test_dpo_rewards_equal_those_of_trl(finetune_trainer_results: Results, trl_results: Results, run_name: str) -> None:
    for metric in METRICS:
        assert finetune_trainer_results[run_name][metric] == pytest.approx(
            trl_results[run_name][metric], rel=FOUR_DIGITS, abs=1e-5
        ), metric
    assert abs(finetune_trainer_results[run_name]["rewards/margins"][-1]) > 0.01


@pytest.mark.parametrize("tuner", ["lora", "full"])
def test_first_dpo_loss_is_log_two(finetune_trainer_results: Results, tuner: str) -> None:
    assert finetune_trainer_results[f"sigmoid, {tuner}"]["loss"][0] == pytest.approx(0.693147, abs=1e-6)
    assert finetune_trainer_results[f"sigmoid, {tuner}"]["loss"][-1] < 0.69
