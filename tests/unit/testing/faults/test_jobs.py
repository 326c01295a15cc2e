"""Tests of the jobs into which faults are injected."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from finetune_api.v1alpha1.job import FineTuneJob
from testing.faults.catalog.matrix import FAULTS
from testing.processes.operator_stack import build_example_job


@pytest.fixture
def job_under_test(tmp_path: Path) -> Any:
    """Return the attributes of a JobUnderTest that some job specs depend on."""
    (tmp_path / "train.jsonl").write_text("{}\n")
    nodes = {"items": [{"status": {"images": [{"names": ["localhost/pause:3.10"]}]}}]}
    installation = SimpleNamespace(
        get_claim_folder=lambda _claim: tmp_path, kubectl=lambda *_arguments: json.dumps(nodes)
    )
    leader = {"spec": {"nodeName": "node1"}}
    return SimpleNamespace(
        name="rows",
        installation=installation,
        find_leader=lambda: leader,
        list_k8s_node_names=lambda: ["node1", "node2"],
    )


@pytest.mark.parametrize("fault", FAULTS)
def test_every_fault_defines_a_valid_job(job_under_test: Any, fault: str) -> None:
    metadata = {"name": fault, "namespace": "default", "uid": "u", "generation": 1, "resourceVersion": "1"}

    job = FineTuneJob.parse(
        {**build_example_job(fault, **FAULTS[fault].build_spec_fields(job_under_test)), "metadata": metadata}
    )

    assert job.spec.num_nodes == 2
