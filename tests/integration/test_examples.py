"""The usual ways to fine-tune: examples that `finetune run` runs as they are, only smaller."""

import json
import math
import sys
from pathlib import Path

import pytest

from finetune_api.v1alpha1.status import AttemptState
from testing.processes.local_mode import LocalJob, wait_until_nothing_runs
from testing.processes.small_examples import Raw, lay_out, shrink

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return lay_out(tmp_path_factory.mktemp("examples"))


def run(job: LocalJob) -> str:
    code, said = job.run("--logs")
    assert code == 0, said
    return said


def history(job: LocalJob) -> list[dict[str, float]]:
    log: list[dict[str, float]] = json.loads((job.output / "result/trainer_state.json").read_text())["log_history"]
    return log


@pytest.mark.parametrize(
    ("example", "effective", "parallelism"),
    [
        ("one-node-four-gpus", 32, "ddp"),
        ("internvl", 16, "ddp"),
        ("qwen2-vl", 4, "deepspeed zero3_offload"),
        ("qwen-vl-video", 16, "ddp"),
    ],
)
def test_an_example_trains_an_adapter(folder: Path, example: str, effective: int, parallelism: str) -> None:
    job = shrink(folder, example)

    said = run(job)

    assert f"parallelism: {parallelism}" in said
    batch = job.status.batch
    assert batch is not None
    assert (batch.world_size, batch.effective) == (2, effective)
    losses = [entry["loss"] for entry in history(job) if "loss" in entry]
    assert len(losses) == 2
    assert losses[1] < losses[0]
    assert (job.output / "result/adapter_model.safetensors").is_file()


def test_preferences_are_learned(folder: Path) -> None:
    """Nine of ten answers that nobody trained on are told from the same words backwards."""

    def longer(spec: Raw) -> None:
        spec["dataset"]["eval"] = [{"name": "/data/held_out.pairs.jsonl"}]
        spec["training"] |= {"maxSteps": 20, "evalSteps": 20}

    job = shrink(folder, "dpo", longer)

    run(job)

    log = history(job)
    assert log[0]["loss"] == pytest.approx(math.log(2), abs=1e-4)  # the policy begins as its reference
    (accuracy,) = (entry["eval_rewards/accuracies"] for entry in log if "eval_rewards/accuracies" in entry)
    assert accuracy > 0.9, log


def test_a_script_that_knows_nothing_of_us_trains_on_two_nodes(folder: Path) -> None:
    job = shrink(folder, "command")

    said = run(job)

    assert "epoch 1 loss" in said
    assert "of 256 rows on 2 ranks" in said
    assert f"it runs with what this machine has ({sys.executable}), not in registry.example/minimind:latest" in said
    assert "what the command wrote to FINETUNE_OUTPUT is in output/default/command" in said
    assert (job.output / "model.pt").is_file()
    assert "epoch 1 loss" in (job.output / "logs/attempt-0/node-0.log").read_text()
    assert job.status.batch is None
    assert [record.state for record in job.status.attempts] == [AttemptState.SUCCEEDED]
    wait_until_nothing_runs(folder)
