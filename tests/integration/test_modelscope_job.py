"""Test of a job whose model and dataset are on ModelScope."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from finetune_api.termination import Outcome
from testing.fakes.modelscope import FakeRepository, serve_modelscope
from testing.models import tiny_text
from testing.processes.supervisors import SupervisorJob

pytestmark = pytest.mark.slow

COMMIT = "1" * 40
NAME, ROWS = "Qwen/Qwen2.5-7B-Instruct", "AI-ModelScope/alpaca-gpt4-data-zh"


def test_two_nodes_train_with_model_and_dataset_of_modelscope(tmp_path: Path) -> None:
    tiny_files = tiny_text.build(tmp_path / "tiny", rows=30, eval_rows=1)
    spec: dict[str, Any] = {
        "model": {"name": NAME, "hub": "modelscope"},
        "dataset": {"train": [{"name": f"{ROWS}#20", "hub": "modelscope"}], "numWorkers": 0},
        "sft": {},
        "lora": {"r": 4},
        "training": {"globalBatchSize": 4, "maxSteps": 2},
        "numNodes": 2,
        "nprocPerNode": 1,
        "output": {"persistentVolumeClaim": {"claimName": "unused"}},
    }
    with serve_modelscope() as hub:
        model = hub.models[NAME] = FakeRepository()
        rows = hub.datasets[ROWS] = FakeRepository()
        model.push(COMMIT, {file.name: file.read_bytes() for file in tiny_files.model.iterdir()})
        rows.push(COMMIT, {"train.jsonl": tiny_files.train.read_bytes()})
        env = {"MODELSCOPE_ENDPOINT": hub.address, "HF_HUB_OFFLINE": "1"}
        job = SupervisorJob(tmp_path, spec, nodes=2, ranks_per_node=1, env=env)

        pods = job.run()

    assert [pod.process.returncode for pod in pods] == [0, 0], pods[0].log + pods[1].log
    assert f"model: {NAME} on ModelScope at commit {COMMIT} (revision master)" in pods[0].log
    termination = pods[0].termination
    assert termination is not None
    assert termination.outcome is Outcome.SUCCEEDED
    assert termination.progress is not None
    assert termination.progress.model_revision == COMMIT
    adapter = json.loads((job.output_folder / "result" / "adapter_config.json").read_text())
    assert (adapter["base_model_name_or_path"], adapter["revision"]) == (NAME, None)
    downloads = Counter(path for _, path in hub.downloads)
    assert {"config.json", "model.safetensors", "train.jsonl"} <= downloads.keys()
    assert set(downloads.values()) == {1}, "one rank downloads each file once"
