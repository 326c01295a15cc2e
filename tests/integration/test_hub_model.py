"""Test of a job with a model on the Hub whose main branch moves between two attempts."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from finetune_api.termination import Outcome
from testing.fakes.hub import FakeModel, serve_hub
from testing.models import tiny_text
from testing.processes.supervisors import SupervisorJob, stop
from testing.processes.write_trace import build_traced_environment, read_written_paths
from testing.written_paths import find_untried

pytestmark = pytest.mark.slow

FIRST, SECOND = "1" * 40, "2" * 40


def test_all_nodes_and_attempts_load_the_commit_of_the_first_attempt_which_is_downloaded_once(tmp_path: Path) -> None:
    tiny_files = tiny_text.build(tmp_path / "tiny", rows=30, eval_rows=1)
    spec: dict[str, Any] = {
        "model": {"name": "acme/base"},
        "dataset": {"train": [{"name": str(tiny_files.train)}], "numWorkers": 0},
        "sft": {},
        "lora": {"r": 4, "merge": True},
        "training": {"globalBatchSize": 4, "maxSteps": 40},
        "numNodes": 2,
        "nprocPerNode": 2,
        "output": {"persistentVolumeClaim": {"claimName": "unused"}},
    }
    with serve_hub() as hub:
        model = hub.models["acme/base"] = FakeModel()
        model.push(FIRST, tiny_files.model)
        env = {"HF_ENDPOINT": hub.address, "HF_HUB_CACHE": str(tmp_path / "cache" / "huggingface" / "hub")}
        env |= build_traced_environment(tmp_path / "traced")
        job = SupervisorJob(tmp_path, spec, nodes=2, ranks_per_node=2, env=env, starts_interpreters=True)
        stopped = job.start()
        stopped[0].wait_for_step(1)
        for pod in stopped:
            stop(pod)
        assert [pod.wait() for pod in stopped] == [143, 143], stopped[0].log + stopped[1].log
        model.push(SECOND, tiny_files.model)

        pods = job.run(attempt=1)

    assert [pod.process.returncode for pod in pods] == [0, 0], pods[0].log + pods[1].log
    assert "resuming from" in pods[0].log
    for pod in (stopped[0], pods[0]):
        assert f"model: acme/base at commit {FIRST} (revision main)" in pod.log
        assert pod.termination is not None
        assert pod.termination.progress is not None
        assert pod.termination.progress.model_revision == FIRST
    assert pods[0].termination is not None
    assert pods[0].termination.outcome is Outcome.SUCCEEDED
    adapter = json.loads((job.output_folder / "result" / "adapter_config.json").read_text())
    assert (adapter["base_model_name_or_path"], adapter["revision"]) == ("acme/base", FIRST)
    assert FIRST in (job.output_folder / "result" / "report.html").read_text()
    assert any(f"/resolve/{FIRST}/" in path for path in hub.requested_paths)
    assert not any(f"/resolve/{SECOND}/" in path for path in hub.requested_paths)
    # one rank requested each file once, by HEAD and GET; several may ask for optional files that do not exist
    requests = Counter(hub.requested_paths)
    counts = {file: requests[f"/acme/base/resolve/{FIRST}/{file}"] for file in model.commits[FIRST]}
    assert counts["model.safetensors"] == 2
    assert max(counts.values()) == 2, counts
    assert find_untried(read_written_paths(tmp_path / "traced", tmp_path)) == set()
