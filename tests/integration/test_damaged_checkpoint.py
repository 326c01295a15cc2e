"""Tests that ranks resume from the checkpoint before one with a changed byte, and what a damaged status costs."""

import os
import signal
from pathlib import Path

import pytest

from testing.models.tiny_text import TinyFiles, build
from testing.processes.local_mode import LocalJob, wait_for_exit, wait_for_processes_to_end, write_job

pytestmark = pytest.mark.slow

TRAINING = {"maxSteps": 30, "saveSteps": 5, "saveTotalLimit": 9, "learningRate": 1e-3, "globalBatchSize": 4}


@pytest.fixture(scope="session")
def tiny_files(tmp_path_factory: pytest.TempPathFactory) -> TinyFiles:
    return build(tmp_path_factory.mktemp("tiny"), rows=64, eval_rows=8)


def run_until(job: LocalJob, step: int, *, attempt: int) -> str:
    """Start the job, stop it after a step, which saves a checkpoint, and return its output."""
    process = job.start("--logs")
    job.wait_for_step(step, node_rank=0, attempt=attempt)
    os.killpg(process.pid, signal.SIGINT)
    code, output = wait_for_exit(process)
    assert code == 130, output
    wait_for_processes_to_end(job.folder)
    return output


def flip_byte_of_newest_checkpoint(job: LocalJob, pattern: str) -> tuple[Path, int]:
    """Change one byte of a file of the newest checkpoint; return the checkpoint, and the step of the one before."""
    *_, before, newest = sorted((job.output / "checkpoints").glob("step-*"))
    file = max(newest.glob(pattern))
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    return newest, int(before.name.removeprefix("step-"))


def test_two_ranks_resume_from_the_checkpoint_before_one_with_a_changed_byte(
    tmp_path: Path, tiny_files: TinyFiles
) -> None:
    job = write_job(tmp_path, tiny_files, training=TRAINING)
    run_until(job, 12, attempt=0)
    damaged, step = flip_byte_of_newest_checkpoint(job, "state/*.safetensors")

    output = run_until(job, step + 7, attempt=1)

    assert f"CheckpointSkipped: {damaged.name}: state/" in output
    assert job.status.attempts[1].first_step == step, output

    damaged, step = flip_byte_of_newest_checkpoint(job, "manifest.json")
    status_file = job.local_folder / "status.json"
    status_file.write_bytes(bytes(status_file.stat().st_size))
    code, output = job.run()
    assert code != 0
    assert "move it to another folder; the same command then continues" in output

    status_file.rename(tmp_path / "damaged.json")
    code, output = job.run("--logs")

    assert code == 0, output
    assert f"CheckpointSkipped: {damaged.name}: manifest.json is damaged" in output
    assert job.status.attempts[0].first_step == step, output
    assert "CheckpointSkipped" in (job.output / "result/report.html").read_text()
