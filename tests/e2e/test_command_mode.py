"""Tests of command mode with unmodified programs and images of users."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from testing.builders.jobs import command
from testing.cluster.fault_injection import Chaos
from testing.cluster.images.project_images import get_image_name
from testing.processes.operator_stack import OperatorInstallation, RawBody, has_condition

pytestmark = pytest.mark.cluster
StartJob = Callable[..., str]

SCRIPTS = Path(__file__).parents[2] / "testing" / "processes" / "scripts"
WITH_TORCH, WITHOUT_TORCH = get_image_name("trainer"), get_image_name("operator")
ENVIRONMENT_PROGRAM = """
import importlib.util, os, pathlib
assert importlib.util.find_spec("torch") is None, "this image contains torch"
values = " ".join(os.environ[name] for name in ("NNODES", "NODE_RANK", "NPROC_PER_NODE", "MASTER_ADDR", "MASTER_PORT"))
pathlib.Path(os.environ["FINETUNE_OUTPUT"], "node-" + os.environ["NODE_RANK"]).write_text(values)
"""
# Prints a bar as tqdm does, with carriage returns only, and a loss as transformers does.
PROGRAM_WITH_BAR = """
import sys, time
for step in range(41):
    bar = f"{100 * step // 40:3}%|##########| {step}/40 [00:{step:02}<00:{40 - step:02},  1.00it/s]"
    print("\\r" + bar, end="", file=sys.stderr, flush=True)
    if step == 5:
        print("\\r{'loss': '1.5', 'grad_norm': '1', 'learning_rate': '5e-05', 'epoch': '0.1'}", flush=True)
    time.sleep(0.6)
"""

FILL_MEMORY = "data = bytearray(120 * 2**20); data[::4096] = bytes(len(data) // 4096)"
FILL_SHARED_MEMORY = """
import mmap
with open("/dev/shm/all", "w+b") as file:
    file.truncate(48 * 2**20)
    with mmap.mmap(file.fileno(), 0) as pages:
        pages[::4096] = bytes(len(pages) // 4096)
"""


@pytest.fixture
def scripts(deployment: OperatorInstallation) -> str:
    """Copy the scripts to the claim and return their path in the pods."""
    folder = deployment.get_claim_folder("datasets") / "scripts"
    shutil.copytree(SCRIPTS, folder, dirs_exist_ok=True)
    for path in (folder, *folder.iterdir()):
        path.chmod(0o755)
    return "/data/scripts"


def build_ddp_command(folder: str, *args: str) -> RawBody:
    return {"script": "plain_ddp.py", "args": ["--save_dir", "$(FINETUNE_OUTPUT)", *args], "workingDir": folder}


def get_failed_condition(job: RawBody) -> RawBody:
    condition: RawBody = next(c for c in job["status"]["conditions"] if c["type"] == "Failed")
    return condition


def test_unmodified_script_resumes_from_its_checkpoint_after_a_rank_is_killed(
    deployment: OperatorInstallation, fault_injector: Chaos, start_job: StartJob, scripts: str
) -> None:
    program = build_ddp_command(scripts, "--epochs", "8", "--seconds_per_step", "0.4")
    job = start_job(**command(program, image=WITH_TORCH))
    checkpoint = deployment.get_output_folder(job) / "model.pt"
    deployment.wait_until(job, lambda _: checkpoint.exists(), description="saved")

    fault_injector.kill_rank(deployment.namespace, f"{job}-0-1", rank=3)
    finished = deployment.wait_until_finished(job)

    assert has_condition(finished, "Complete"), finished["status"]
    killed, last = finished["status"]["attempts"]
    assert (killed["reason"], killed["nodeRank"], last["state"]) == ("RankKilled", 1, "Succeeded")
    assert finished["status"]["restarts"] == 1
    assert finished["status"]["output"] == f"models:{deployment.namespace}/{job}"
    assert "batch" not in finished["status"]
    log = deployment.kubectl("logs", f"{job}-1-0")
    assert "epoch 7 loss" in log
    assert "on 4 ranks" in log
    assert "epoch 0 loss" not in log, "the script did not resume from its checkpoint"


def test_progress_in_the_output_of_a_program_is_displayed(
    deployment: OperatorInstallation, start_job: StartJob
) -> None:
    program = {"exec": ["python3", "-c", PROGRAM_WITH_BAR]}
    job = start_job(**command(program, image=WITHOUT_TORCH, numNodes=1))

    def is_progress_displayed(job_body: RawBody) -> Any:
        progress = job_body.get("status", {}).get("progress") or {}
        return 0 < progress.get("step", 0) < 40 and progress.get("loss") == 1.5 and progress.get("fromLog")

    running = deployment.wait_until(job, is_progress_displayed, description="displaying progress")
    assert running["status"]["display"]["progress"].endswith("/40")
    assert "eta" in running["status"]["display"]

    finished = deployment.wait_until_finished(job)
    assert has_condition(finished, "Complete"), finished["status"]
    assert finished["status"]["progress"]["step"] == 40


def test_image_without_torch_runs_an_exec_command(deployment: OperatorInstallation, start_job: StartJob) -> None:
    job = start_job(**command({"exec": ["python3", "-c", ENVIRONMENT_PROGRAM]}, image=WITHOUT_TORCH))

    finished = deployment.wait_until_finished(job)

    assert has_condition(finished, "Complete"), finished["status"]
    master = f"{job}-0-0.{job}.{deployment.namespace}.svc.cluster.local 29500"
    written = [(deployment.get_output_folder(job) / f"node-{rank}").read_text() for rank in range(2)]
    assert written == [f"2 {rank} 2 {master}" for rank in range(2)]


MEMORY_SHORTAGES = {
    "memory": (FILL_MEMORY, "96Mi", {}, "HostOutOfMemory", "resources.limits.memory 96Mi -> 192Mi"),
    "shared memory": (
        FILL_SHARED_MEMORY,
        "160Mi",
        {"shmSize": "32Mi"},
        "SharedMemoryExhausted",
        "shmSize 32Mi -> 64Mi",
    ),
}


@pytest.mark.parametrize("resource", MEMORY_SHORTAGES)
def test_out_of_memory_job_is_repaired_and_completes(
    deployment: OperatorInstallation, start_job: StartJob, resource: str
) -> None:
    program, limit, fields, reason, change = MEMORY_SHORTAGES[resource]
    job = start_job(
        **command({"exec": ["python3", "-c", program]}, image=WITHOUT_TORCH, numNodes=1),
        resources={"limits": {"cpu": 1, "memory": limit}},
        restartPolicy={"maxMemory": "256Mi"},
        **fields,
    )

    finished = deployment.wait_until_finished(job)

    assert has_condition(finished, "Complete"), finished["status"]
    first, last = finished["status"]["attempts"]
    assert (first["reason"], first["action"], last["state"]) == (reason, "Repair", "Succeeded"), first
    assert first["message"].endswith(f"retried with {change}")


def find_image_without_python(deployment: OperatorInstallation) -> str:
    """Return the name of the pause image, which exists on every Kubernetes node."""
    (node, *_) = json.loads(deployment.kubectl("get", "nodes", "-o", "json"))["items"]
    names = (str(name) for image in node["status"]["images"] for name in image["names"] or ())
    return next(name for name in names if "pause:" in name and "@" not in name)


def test_image_without_python_fails_the_job_without_restart(
    deployment: OperatorInstallation, start_job: StartJob, scripts: str
) -> None:
    image = find_image_without_python(deployment)
    finished = deployment.wait_until_finished(start_job(**command(build_ddp_command(scripts), image=image, numNodes=1)))

    condition = get_failed_condition(finished)
    assert condition["reason"] == "StartError"
    assert "spec.image has no python3 on its PATH" in condition["message"]
    assert len(finished["status"]["attempts"]) == 1
