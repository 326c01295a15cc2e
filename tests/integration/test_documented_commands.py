"""Run the shell blocks of README.md and docs/ that need no cluster, as they are printed, and compare their output.

Each page starts in a new copy of the repository, with the files that its reader brings: a job file, a command of
another tool, rows, and the configs of models that the job would load from the Hub. A test of a block that is not run is
skipped with its reason. Test with the blocks that need a cluster: tests/e2e/test_documented_commands.py.
"""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from testing.documented_commands import (
    CommandBlock,
    Place,
    build_environment,
    copy_clone,
    list_blocks,
    run_block,
    select_blocks,
    write_swift_command,
)
from testing.models import published_configs, tiny_text
from testing.processes.forks.fork_server import use_forks
from testing.processes.local_mode import wait_for_processes_to_end, write_job

pytestmark = pytest.mark.slow

LAPTOP = select_blocks(Place.LAPTOP)
INSTALLATION = select_blocks(Place.PACKAGE_INDEX)
FIRST_PAGE = "docs/getting-started.md"  # its commands start no forks
NOT_RUN = [block for block in list_blocks() if block.place is Place.NOWHERE]


def write_local_job(clone: Path) -> None:
    """Write job.yaml, a short job for two processes, and its data."""
    job = write_job(clone, tiny_text.build(clone / "data", rows=64, eval_rows=4))
    job.job_file.rename(clone / "job.yaml")


def write_first_example(clone: Path) -> None:
    """Write job.yaml, the first example with the sizes that the page states, and the config of its model."""
    job = yaml.safe_load((clone / "manifests/examples/first.yaml").read_text())
    job["spec"]["dataset"]["maxLength"] = 2048
    job["spec"]["training"] = {"perDeviceTrainBatchSize": 4, "gradientAccumulationSteps": 2}
    (clone / "job.yaml").write_text(yaml.safe_dump(job))
    published_configs.write_qwen2_5_7b(clone / "Qwen/Qwen2.5-7B-Instruct")


# what the reader of a page brings; a model with a Hub id is in a folder of that name next to the job file
PREPARATIONS: dict[str, Callable[[Path], object]] = {
    "README.md": write_swift_command,
    "docs/how-to/batch-size.md": lambda clone: published_configs.write_internvl3_8b(
        clone / "manifests/examples/OpenGVLab/InternVL3-8B-hf"
    ),
    "docs/how-to/data-parallel.md": lambda clone: published_configs.write_qwen2_5_7b(
        clone / "data/models/Qwen2.5-7B-Instruct"
    ),
    "docs/how-to/dpo.md": lambda clone: published_configs.write_qwen2_5_1_5b(
        clone / "manifests/examples/Qwen/Qwen2.5-1.5B-Instruct"
    ),
    "docs/how-to/multi-node.md": lambda clone: published_configs.write_qwen2_vl_7b(
        clone / "models/Qwen2-VL-7B-Instruct"
    ),
    "docs/user-guide/local-mode.md": write_local_job,
    "docs/user-guide/memory.md": write_first_example,
}


def is_package_index_reachable(pip: Path, folder: Path) -> bool:
    download = (pip, "download", "--retries=0", "--timeout=20", "--no-deps", "hatchling")
    return subprocess.run(download, cwd=folder, check=False).returncode == 0


@pytest.mark.parametrize("page", LAPTOP)
def test_commands_of_a_page_run_as_printed(page: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    clone = copy_clone(tmp_path / "finetune-operator")
    if page in PREPARATIONS:
        PREPARATIONS[page](clone)
    environment = build_environment(clone, tmp_path / "bin")
    if page != FIRST_PAGE:
        environment = use_forks(environment)

    for block in LAPTOP[page]:
        completed = run_block(block, clone=clone, environment=environment)
        with capsys.disabled():
            print(completed)

    wait_for_processes_to_end(clone)


def test_printed_commands_install_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    clone = copy_clone(tmp_path / "finetune-operator")
    subprocess.run((sys.executable, "-m", "venv", tmp_path / "venv"), check=True)
    programs = tmp_path / "venv/bin"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment["PATH"] = f"{programs}{os.pathsep}{environment['PATH']}"
    if not is_package_index_reachable(programs / "pip", tmp_path):
        pytest.skip("the package index is not reachable")

    for block in (block for blocks in INSTALLATION.values() for block in blocks):
        completed = run_block(block, clone=clone, environment=environment)
        with capsys.disabled():
            print(completed)

    for name in ("finetune", "kubectl-finetune"):
        help_text = subprocess.run((programs / name, "--help"), env=environment, capture_output=True, check=True).stdout
        assert b"submit" in help_text


@pytest.mark.parametrize("block", NOT_RUN, ids=lambda block: block.location)
def test_block_is_not_run(block: CommandBlock) -> None:
    pytest.skip(f"{block.location} is not run: {block.not_run}")
