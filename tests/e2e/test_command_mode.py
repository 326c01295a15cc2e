"""Programs of the user's own in images of their own: the supervisor comes to them, and they need not know."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from testing.builders.jobs import command
from testing.cluster.fault_injection import Chaos
from testing.cluster.images.project_images import image_name
from testing.processes.operator_stack import Raw, Stack, condition

pytestmark = pytest.mark.cluster
Start = Callable[..., str]

SCRIPTS = Path(__file__).parents[2] / "testing" / "processes" / "scripts"
WITH_TORCH, WITHOUT_TORCH = image_name("trainer"), image_name("operator")
FOREIGN = """
import importlib.util, os, pathlib
assert importlib.util.find_spec("torch") is None, "this image is no foreign one"
said = " ".join(os.environ[name] for name in ("NNODES", "NODE_RANK", "NPROC_PER_NODE", "MASTER_ADDR", "MASTER_PORT"))
pathlib.Path(os.environ["FINETUNE_OUTPUT"], "node-" + os.environ["NODE_RANK"]).write_text(said)
"""

FILLS_ITS_MEMORY = "data = bytearray(120 * 2**20); data[::4096] = bytes(len(data) // 4096)"
FILLS_SHARED_MEMORY = """
import mmap
with open("/dev/shm/all", "w+b") as file:
    file.truncate(48 * 2**20)
    with mmap.mmap(file.fileno(), 0) as pages:
        pages[::4096] = bytes(len(pages) // 4096)
"""


@pytest.fixture
def scripts(stack: Stack) -> str:
    """Where the pods see the scripts."""
    folder = stack.folder("datasets") / "scripts"
    shutil.copytree(SCRIPTS, folder, dirs_exist_ok=True)
    for path in (folder, *folder.iterdir()):
        path.chmod(0o755)
    return "/data/scripts"


def ddp(folder: str, *args: str) -> Raw:
    return {"script": "plain_ddp.py", "args": ["--save_dir", "$(FINETUNE_OUTPUT)", *args], "workingDir": folder}


def failed(job: Raw) -> Raw:
    found: Raw = next(c for c in job["status"]["conditions"] if c["type"] == "Failed")
    return found


def test_a_script_that_knows_nothing_of_us_survives_a_killed_rank(
    stack: Stack, chaos: Chaos, start: Start, scripts: str
) -> None:
    program = ddp(scripts, "--epochs", "8", "--seconds_per_step", "0.4")
    job = start(**command(program, image=WITH_TORCH))
    checkpoint = stack.output(job) / "model.pt"
    stack.wait(job, lambda _: checkpoint.exists(), what="saved")

    chaos.kill_rank(stack.namespace, f"{job}-0-1", rank=3)
    finished = stack.wait_finished(job)

    assert condition(finished, "Complete"), finished["status"]
    killed, last = finished["status"]["attempts"]
    assert (killed["reason"], killed["nodeRank"], last["state"]) == ("RankKilled", 1, "Succeeded")
    assert finished["status"]["restarts"] == 1
    assert finished["status"]["output"] == f"models:{stack.namespace}/{job}"
    assert "batch" not in finished["status"]
    said = stack.kubectl("logs", f"{job}-1-0")
    assert "epoch 7 loss" in said
    assert "on 4 ranks" in said
    assert "epoch 0 loss" not in said, "it went on from its own checkpoint"


def test_a_trainer_of_transformers_shows_its_progress_without_a_change(
    stack: Stack, start: Start, scripts: str
) -> None:
    program = {"script": f"{scripts}/plain_trainer.py", "args": ["/data/model", "$(FINETUNE_OUTPUT)", "150"]}
    job = start(**command(program, image=WITH_TORCH, nprocPerNode=1))

    def in_the_middle(seen: Raw) -> Any:
        progress = seen.get("status", {}).get("progress") or {}
        return 0 < progress.get("step", 0) < 150 and progress.get("loss") and progress.get("etaSeconds") is not None

    middle = stack.wait(job, in_the_middle, what="told of its progress")
    assert middle["status"]["progress"]["totalSteps"] == 150
    assert middle["status"]["display"]["progress"].endswith("/150")

    finished = stack.wait_finished(job)
    assert condition(finished, "Complete"), finished["status"]
    assert finished["status"]["progress"]["step"] == 150


def test_an_image_that_has_only_python_runs_a_program_of_its_own(stack: Stack, start: Start) -> None:
    job = start(**command({"exec": ["python3", "-c", FOREIGN]}, image=WITHOUT_TORCH))

    finished = stack.wait_finished(job)

    assert condition(finished, "Complete"), finished["status"]
    master = f"{job}-0-0.{job}.{stack.namespace}.svc.cluster.local 29500"
    written = [(stack.output(job) / f"node-{rank}").read_text() for rank in range(2)]
    assert written == [f"2 {rank} 2 {master}" for rank in range(2)]


def test_an_exception_is_the_users_and_told_with_its_rank(stack: Stack, start: Start, scripts: str) -> None:
    job = start(**command(ddp(scripts, "--raise_on_rank", "3"), image=WITH_TORCH))

    finished = stack.wait_finished(job)

    told = failed(finished)
    assert told["reason"] == "UserCodeError"
    assert "rank 3" in told["message"]
    assert "ValueError: row 1 of rank 3 has no label" in told["message"]
    assert len(finished["status"]["attempts"]) == 1


SHORT_OF = {
    "memory": (FILLS_ITS_MEMORY, "96Mi", {}, "HostOutOfMemory", "resources.limits.memory 96Mi -> 192Mi"),
    "shared memory": (
        FILLS_SHARED_MEMORY,
        "160Mi",
        {"shmSize": "32Mi"},
        "SharedMemoryExhausted",
        "shmSize 32Mi -> 64Mi",
    ),
}


@pytest.mark.parametrize("what", SHORT_OF)
def test_a_container_that_ran_short_gets_more_and_ends_well(stack: Stack, start: Start, what: str) -> None:
    program, limit, fields, reason, changed = SHORT_OF[what]
    job = start(
        **command({"exec": ["python3", "-c", program]}, image=WITHOUT_TORCH, numNodes=1),
        resources={"limits": {"cpu": 1, "memory": limit}},
        restartPolicy={"maxMemory": "256Mi"},
        **fields,
    )

    finished = stack.wait_finished(job)

    assert condition(finished, "Complete"), finished["status"]
    first, last = finished["status"]["attempts"]
    assert (first["reason"], first["action"], last["state"]) == (reason, "Repair", "Succeeded"), first
    assert first["message"].endswith(f"retried with {changed}")


def image_without_torch(_: Stack) -> str:
    return WITHOUT_TORCH


def image_without_python(stack: Stack) -> str:
    """The pause image, which every node has."""
    (node, *_) = json.loads(stack.kubectl("get", "nodes", "-o", "json"))["items"]
    listed = (str(name) for image in node["status"]["images"] for name in image["names"] or ())
    return next(name for name in listed if "pause:" in name and "@" not in name)


LACKING = {
    "torch": (image_without_torch, "InvalidSpec", "has no torch, and there is no torchrun on the PATH"),
    "python": (image_without_python, "StartError", "spec.image has no python3 on its PATH"),
}


@pytest.mark.parametrize("lacking", LACKING)
def test_what_an_image_lacks_is_named_and_not_tried_again(
    stack: Stack, start: Start, scripts: str, lacking: str
) -> None:
    image, reason, words = LACKING[lacking]

    finished = stack.wait_finished(start(**command(ddp(scripts), image=image(stack), numNodes=1)))

    told = failed(finished)
    assert told["reason"] == reason
    assert words in told["message"]
    assert len(finished["status"]["attempts"]) == 1
