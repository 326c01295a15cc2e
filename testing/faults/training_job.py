"""Jobs that run training_program.py, which saves, resumes and reports progress like a training, without torch."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

from testing.builders.jobs import command
from testing.cluster.images.project_images import get_image_name
from testing.processes.operator_stack import OperatorInstallation, RawBody
from testing.processes.waiting import wait_until

INJECT = Path(__file__).parents[1] / "fakes" / "inject"
POD_FOLDER = "/data/chaos"  # folder in which the pods mount the programs


def copy_programs(installation: OperatorInstallation) -> None:
    """Copy the programs to the dataset volume, where the pods mount them."""
    folder = installation.get_claim_folder("datasets") / "chaos"
    (folder / "inject").mkdir(parents=True, exist_ok=True)
    shutil.copy(Path(__file__).parent / "training_program.py", folder / "program.py")
    shutil.copy(INJECT / "sitecustomize.py", folder / "inject")
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o755)


def build_program_fields(*arguments: str, ranks: int = 1, **fields: Any) -> RawBody:
    """Return the spec fields of a job that runs training_program.py, as a script if a node has several ranks."""
    if ranks == 1:
        run: RawBody = {"exec": ["python3", f"{POD_FOLDER}/program.py", *arguments]}
        image = get_image_name("operator")  # the smallest image with Python
    else:
        run = {"script": "program.py", "args": list(arguments), "workingDir": POD_FOLDER}
        image = get_image_name("trainer")
    return command(run, **{"image": image, "nprocPerNode": ranks, **fields})


def wait_for_save(installation: OperatorInstallation, job: str, *, after: int = 0) -> int:
    """Wait until the program has saved a step after the given one, and return the step."""

    def read_saved_step() -> int:
        path = installation.get_output_folder(job) / "saved.json"
        return int(json.loads(path.read_text())["step"]) if path.exists() else 0

    wait_until(lambda: read_saved_step() > after, goal=f"{job} has saved a step after {after}", timeout_seconds=150)
    return read_saved_step()


def read_first_step(installation: OperatorInstallation, pod: str) -> int:
    """Return the first step in the log of a pod of node 0."""
    steps = re.findall(r"^step (\d+)$", installation.kubectl("logs", pod), re.MULTILINE)
    return int(steps[0])


def request_finish(installation: OperatorInstallation, job: str) -> None:
    """Make the program end successfully at its next step.

    Raises: FileNotFoundError if the program never ran; a folder created here would not be writable for it.
    """
    (installation.get_output_folder(job) / "finish").touch()
