"""Tests of the command line and the Python client on a real cluster."""

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from html import escape
from pathlib import Path
from typing import Any

import pytest
import yaml

from finetune_client import Client, ClientError, LogSelection, Machines
from finetune_client.async_client import WaitTarget
from testing.cluster.images.project_images import get_image_name
from testing.faults.training_job import read_first_step, request_finish, wait_for_save
from testing.processes.cluster_training import build_training_fields, wait_for_checkpoint
from testing.processes.operator_stack import OperatorInstallation, build_example_job, has_condition

pytestmark = pytest.mark.cluster
POD_CHECK_SELECTOR = "app.kubernetes.io/component=pod-check"
StartJob = Callable[..., str]
Finetune = Callable[..., str]


@pytest.fixture
def finetune(deployment: OperatorInstallation) -> Finetune:
    """Return a function that runs a command in the namespace of the jobs and returns its output."""
    kubeconfig = str(deployment.provider.kubeconfig)

    def run(command: str, *arguments: str, exit_code: int = 0) -> str:
        options = ("--namespace", deployment.namespace, "--kubeconfig", kubeconfig)
        process = subprocess.run(
            [sys.executable, "-m", "finetune_cli", command, *options, *arguments],
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        assert process.returncode == exit_code, f"{command} {arguments}\n{process.stdout}\n{process.stderr}"
        return process.stdout

    return run


@pytest.fixture
def client(deployment: OperatorInstallation) -> Iterator[Client]:
    with Client(namespace=deployment.namespace, kubeconfig=str(deployment.provider.kubeconfig)) as client:
        yield client


@pytest.fixture
def write_job(deployment: OperatorInstallation, job_name: str, tmp_path: Path) -> Iterator[Callable[..., Path]]:
    """Return a function that writes the CPU example with changed fields to a file; the job is deleted at the end."""

    def write(**fields: Any) -> Path:
        path = tmp_path / "job.yaml"
        path.write_text(yaml.safe_dump(build_example_job(job_name, **fields)))
        return path

    yield write
    deployment.kubectl("delete", "ftj", job_name, "--ignore-not-found", "--wait")


def test_a_submitted_job_is_followed_to_its_end_and_its_files_are_copied(
    deployment: OperatorInstallation,
    finetune: Finetune,
    write_job: Callable[..., Path],
    job_name: str,
    tmp_path: Path,
) -> None:
    file = str(write_job(training=build_training_fields(max_steps=6)))
    assert finetune("submit", file, "--dry-run").startswith(f"{deployment.namespace}/{job_name} would be created")

    followed = finetune("submit", file, "--follow")

    assert followed.startswith(f"{deployment.namespace}/{job_name} created: 2 x 2 processes, effective batch ")
    assert "Running: attempt 0 runs on 2 nodes" in followed
    assert "Complete  nodes " in followed
    assert job_name in finetune("list", "--output", "name").splitlines()
    assert has_condition(json.loads(finetune("status", "--output", "json", job_name)), "Complete")
    assert "step 6/6" in finetune("logs", job_name)
    assert any(line.startswith("[0] step 6/6") for line in finetune("logs", "--node", "all", job_name).splitlines())
    assert f"{job_name}  Completed: " in finetune("events", job_name)
    assert finetune("why", job_name).startswith(f"{job_name} is complete: ")
    assert "has ended" in run_and_get_error(deployment, "submit", file, exit_code=3)

    # No pod of the job runs any more, so that a pod is created that reads the output.
    output = deployment.get_output_folder(job_name)
    finetune("cp", job_name, str(tmp_path / "adapter"))
    copied = {path.relative_to(tmp_path / "adapter") for path in (tmp_path / "adapter").rglob("*")}
    assert copied == {path.relative_to(output / "result") for path in (output / "result").rglob("*")}
    finetune("report", job_name, "--no-browser", "--output", str(tmp_path / "report.html"))
    assert escape((output / "result" / "report.html").read_text()) in (tmp_path / "report.html").read_text()
    assert "step 6/6" in finetune("logs", "--saved", job_name)
    assert "-output-" not in deployment.kubectl("get", "pods", "-o", "name")


def run_and_get_error(deployment: OperatorInstallation, *arguments: str, exit_code: int) -> str:
    """Run a command that fails with this exit code, and return its error output."""
    options = ("--namespace", deployment.namespace, "--kubeconfig", str(deployment.provider.kubeconfig))
    command = [sys.executable, "-m", "finetune_cli", arguments[0], *options, *arguments[1:]]
    process = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert process.returncode == exit_code, process.stdout + process.stderr
    return process.stderr


def test_a_running_job_is_examined_suspended_resumed_and_deleted(
    deployment: OperatorInstallation, finetune: Finetune, start_job: StartJob, tmp_path: Path
) -> None:
    # the checkpoint must still exist when it is copied
    training = build_training_fields(max_steps=100_000, save_steps=20, saveTotalLimit=1000)
    job = start_job(training=training)
    assert finetune("wait", "--for", "training", job) == f"{job} is Running\n"

    ranks = [line.split()[0] for line in finetune("top", job).splitlines() if line[:1].isdigit()]
    assert ranks == ["0", "1", "2", "3"]
    checkpoint = f"checkpoints/step-{wait_for_checkpoint(deployment, job):08}"
    finetune("cp", f"{job}:{checkpoint}/manifest.json", str(tmp_path / "manifest.json"))
    assert json.loads((tmp_path / "manifest.json").read_text())

    assert finetune("suspend", "--wait", job) == f"{job} suspended\n"
    assert "finetune resume" in finetune("why", job)
    assert finetune("resume", "--wait", job) == f"{job} runs\n"
    assert "not finished after 1 s" in run_and_get_error(deployment, "wait", job, "--timeout", "1", exit_code=4)
    assert finetune("delete", "--yes", job) == f"{job} deleted\n"
    assert "not found" in run_and_get_error(deployment, "status", job, exit_code=3)


@pytest.mark.versions
def test_followed_logs_continue_after_a_restart(
    deployment: OperatorInstallation, client: Client, start_training_program: Callable[[], str]
) -> None:
    job = start_training_program()
    saved = wait_for_save(deployment, job)
    with ThreadPoolExecutor() as executor:
        reading = executor.submit(lambda: list(client.read_logs(job, LogSelection(nodes=None, follow=True))))
        try:
            deployment.kubectl("delete", "pod", f"{job}-0-1", "--wait=false")
            deployment.wait_until(job, lambda body: body["status"]["attempt"] == 1, description="restarted")
        finally:
            request_finish(deployment, job)  # the logs end with the job
        lines = reading.result()

    finished = deployment.get_job(job)
    last_step = finished["status"]["progress"]["step"]
    assert any((line.attempt, line.text) == (0, f"step {saved}") for line in lines)
    assert any((line.attempt, line.text) == (1, f"step {last_step}") for line in lines)
    deleted, last = finished["status"]["attempts"]
    assert (deleted["reason"], deleted["nodeRank"], last["state"]) == ("PodDeleted", 1, "Succeeded"), finished["status"]
    assert read_first_step(deployment, f"{job}-1-0") > saved > 0
    assert client.get(job).phase == "Complete"


def test_a_failed_job_is_explained_with_its_cause_and_remedy(
    finetune: Finetune, write_job: Callable[..., Path], deployment: OperatorInstallation, job_name: str
) -> None:
    file = write_job(
        dataset={"train": [{"name": "/data/none.jsonl"}]}, numNodes=1, training=build_training_fields(max_steps=4)
    )

    assert "finetune why" in run_and_get_error(deployment, "submit", str(file), "--follow", exit_code=1)

    status = deployment.get_job(job_name)["status"]
    [attempt] = status["attempts"]
    assert (attempt["reason"], attempt["fault"], status.get("restarts", 0)) == ("DatasetError", "user", 0)
    assert "/data/none.jsonl" in attempt["message"]
    page = finetune("why", job_name)
    assert page.startswith(f"{job_name} has failed: DatasetError: ")
    assert "the job: its spec, its data or its program has to change" in page
    assert "finetune logs" in page


def test_pods_show_whether_the_image_starts_and_the_network_works(
    deployment: OperatorInstallation, finetune: Finetune, write_job: Callable[..., Path]
) -> None:
    output = finetune("doctor", str(write_job()))

    checks = re.findall(r"^(image|DNS|pod network) +(\w+)", output, re.MULTILINE)
    assert checks == [("image", "ok"), ("DNS", "ok"), ("pod network", "ok")], output
    deployment.kubectl("wait", "--for=delete", "pods,services", "-l", POD_CHECK_SELECTOR, "--timeout=60s")

    output = finetune("doctor", str(write_job(image="nowhere.example/none:1", imagePullPolicy="Never")), exit_code=1)

    assert "ErrImageNeverPull" in output
    deployment.kubectl("wait", "--for=delete", "pods,services", "-l", POD_CHECK_SELECTOR, "--timeout=60s")


def sum_of_ranks(offset: int) -> None:
    """Print the sum of all ranks, exchanged by torch.distributed."""
    import torch
    import torch.distributed

    torch.distributed.init_process_group("gloo")
    total = torch.tensor(torch.distributed.get_rank() + offset)
    torch.distributed.all_reduce(total)
    print(f"sum of ranks {total.item()}", flush=True)
    torch.distributed.destroy_process_group()


def test_a_python_function_runs_on_all_ranks(deployment: OperatorInstallation, client: Client, job_name: str) -> None:
    spec = {"nprocPerNode": 2, "imagePullPolicy": "Never", "resources": {"requests": {"cpu": "100m"}}}
    client.run_function(
        job_name,
        sum_of_ranks,
        image=get_image_name("trainer"),
        arguments={"offset": 10},
        machines=Machines(nodes=2, spec=spec),
    )
    try:
        assert client.get_result(job_name, timeout_seconds=240).phase == "Complete"
        lines = [line.text for line in client.read_logs(job_name, LogSelection(nodes=None))]
    finally:
        client.delete(job_name)

    assert sum("sum of ranks 46" in line for line in lines) == 4
    deployment.kubectl("wait", "--for=delete", f"configmap/{job_name}-function", "--timeout=60s")


def test_a_job_from_python_arguments_trains(client: Client, job_name: str) -> None:
    client.train(
        job_name,
        model="/data/model",
        dataset={"train": [{"name": "/data/train.jsonl"}], "max_length": 128},
        output="models",
        lora={"r": 4},
        training={"max_steps": 2, "per_device_train_batch_size": 2},
        machines=Machines(volumes={"datasets": "/data"}, spec={"image_pull_policy": "Never"}),
    )
    try:
        assert client.wait(job_name, WaitTarget.COMPLETE, timeout_seconds=240).phase == "Complete"
    finally:
        client.delete(job_name)

    with pytest.raises(ClientError, match="not found"):
        client.get(job_name)
