"""Tests that run manifests/examples with `finetune run`, but with small models and datasets."""

import json
import math
import sys
from pathlib import Path

import pytest

from finetune_api.v1alpha1.status import AttemptState
from testing.processes.local_mode import LocalJob, RawBody, wait_for_processes_to_end
from testing.processes.small_examples import create_example_inputs, write_small_example

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return create_example_inputs(tmp_path_factory.mktemp("examples"))


def run_job(job: LocalJob) -> str:
    code, output = job.run("--logs")
    assert code == 0, output
    return output


def read_log_history(job: LocalJob) -> list[dict[str, float]]:
    log: list[dict[str, float]] = json.loads((job.output / "result/trainer_state.json").read_text())["log_history"]
    return log


@pytest.mark.parametrize(
    ("example", "effective_batch", "parallelism"),
    [
        ("one-node-four-gpus", 32, "ddp"),
        ("internvl", 16, "ddp"),
        ("qwen2-vl", 4, "deepspeed zero3_offload"),
        ("qwen-vl-video", 16, "ddp"),
    ],
)
def test_example_trains_an_adapter(folder: Path, example: str, effective_batch: int, parallelism: str) -> None:
    job = write_small_example(folder, example)

    output = run_job(job)

    assert f"parallelism: {parallelism}" in output
    batch = job.status.batch
    assert batch is not None
    assert (batch.world_size, batch.effective) == (2, effective_batch)
    losses = [entry["loss"] for entry in read_log_history(job) if "loss" in entry]
    assert len(losses) == 2
    assert losses[1] < losses[0]
    assert (job.output / "result/adapter_model.safetensors").is_file()


def test_dpo_learns_preferences(folder: Path) -> None:
    """The model ranks over 90 % of held-out pairs correctly; the words of rejected completions are reversed."""

    def train_longer(spec: RawBody) -> None:
        spec["dataset"]["eval"] = [{"name": "/data/held_out.pairs.jsonl"}]
        spec["training"] |= {"maxSteps": 20, "evalSteps": 20}

    job = write_small_example(folder, "dpo", train_longer)

    run_job(job)

    log = read_log_history(job)
    assert log[0]["loss"] == pytest.approx(math.log(2), abs=1e-4)  # initially, the policy equals the reference model
    (accuracy,) = (entry["eval_rewards/accuracies"] for entry in log if "eval_rewards/accuracies" in entry)
    assert accuracy > 0.9, log


def test_unmodified_script_trains_on_two_nodes(folder: Path) -> None:
    job = write_small_example(folder, "command")

    output = run_job(job)

    assert "epoch 1 loss" in output
    assert "of 256 rows on 2 ranks" in output
    assert (
        f"it runs in the environment of this machine ({sys.executable}), not in registry.example/minimind:latest"
        in output
    )
    assert "what the command wrote to FINETUNE_OUTPUT is in output/default/command" in output
    assert (job.output / "model.pt").is_file()
    assert "epoch 1 loss" in (job.output / "logs/attempt-0/node-0.log").read_text()
    assert job.status.batch is None
    assert [record.state for record in job.status.attempts] == [AttemptState.SUCCEEDED]
    wait_for_processes_to_end(folder)
