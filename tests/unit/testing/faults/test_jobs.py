"""Tests of the jobs into which faults are injected, and of their training program."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from finetune_api.v1alpha1.job import FineTuneJob
from testing.faults.catalog.matrix import FAULTS
from testing.processes.operator_stack import build_example_job
from testing.processes.supervisors import find_free_port

PROGRAM = Path(__file__).parents[4] / "testing" / "faults" / "training_program.py"
StartProgram = Callable[..., list[subprocess.Popen[bytes]]]


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


@pytest.fixture
def start_program(tmp_path: Path) -> StartProgram:
    """Return a function that starts the program on two nodes, with the environment variables that the operator sets."""
    (tmp_path / "token").write_text("t")

    def run(*arguments: str, attempt: int = 0) -> list[subprocess.Popen[bytes]]:
        environment = {
            **os.environ,
            "NNODES": "2",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(find_free_port()),
            "FINETUNE_OUTPUT": str(tmp_path),
            "FINETUNE_ATTEMPT": str(attempt),
            "KUBEFLOW_TRAINER_SERVER_URL": f"http://127.0.0.1:{find_free_port()}",  # no server listens on this port
            "KUBEFLOW_TRAINER_SERVER_TOKEN": str(tmp_path / "token"),
        }
        command = [sys.executable, str(PROGRAM), "--seconds", "0.01", *arguments]
        return [
            subprocess.Popen(
                command, env={**environment, "NODE_RANK": str(rank)}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
            )
            for rank in range(2)
        ]

    return run


def wait_for_exit(processes: list[subprocess.Popen[bytes]]) -> tuple[list[int], list[str]]:
    """Wait for the processes and return their exit codes and output."""
    outputs = [process.communicate(timeout=60)[0].decode() for process in processes]
    return [process.returncode for process in processes], outputs


def read_saved_step(folder: Path) -> int:
    return int(json.loads((folder / "saved.json").read_text())["step"])


def wait_for_save(folder: Path) -> None:
    deadline = time.monotonic() + 60
    while not (folder / "saved.json").exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_failure_of_one_rank_ends_all_ranks_and_next_attempt_resumes(
    start_program: StartProgram, tmp_path: Path
) -> None:
    codes, outputs = wait_for_exit(start_program("--fault", "exception"))
    assert codes == [1, 1]
    assert "[rank1]: ValueError: row 1207 has no label" in outputs[1]
    assert "fault injected at " in outputs[1]
    assert "[rank0]: DistBackendError: Connection closed by peer" in outputs[0]
    assert read_saved_step(tmp_path) == 20

    (tmp_path / "finish").touch()
    codes, outputs = wait_for_exit(start_program("--fault", "exception", attempt=1))
    assert codes == [0, 0]
    assert [line for line in outputs[0].splitlines() if line.startswith("step")] == ["step 21"]


def test_sigterm_on_one_node_makes_all_nodes_save_and_exit(start_program: StartProgram, tmp_path: Path) -> None:
    processes = start_program()
    wait_for_save(tmp_path)

    processes[1].send_signal(signal.SIGTERM)
    assert processes[1].wait(timeout=60) == 0
    assert processes[0].poll() is None, "the other node waits for SIGTERM"
    processes[0].send_signal(signal.SIGTERM)

    codes, outputs = wait_for_exit(processes)
    assert codes == [0, 0]
    last_line = [line for line in outputs[0].splitlines() if line.startswith("step")][-1]
    assert last_line == f"step {read_saved_step(tmp_path)}"
