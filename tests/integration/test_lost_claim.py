"""Tests that a claim that fills up or vanishes at any step costs no checkpoint, and never ends a job without a name.

The claim is a small tmpfs, which stays mounted elsewhere, so that its content can be checked.
"""

import json
import random
import subprocess
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from finetune_api.v1alpha1.status import AttemptState
from testing.long_tests import mark_long
from testing.models.tiny_text import TinyFiles, build
from testing.processes.local_mode import LocalJob, wait_for_exit, write_job

pytestmark = pytest.mark.slow

SEEDS = range(10)
TRAINING = {"maxSteps": 40, "saveSteps": 4, "saveTotalLimit": 3, "learningRate": 1e-3, "globalBatchSize": 4}


@dataclass(frozen=True)
class MountedClaim:
    """A volume, and the folder at which a job uses it."""

    volume: Path
    mount_point: Path

    def fill(self) -> None:
        with suppress(OSError), (self.volume / "ballast").open("wb", buffering=0) as file:
            while True:
                file.write(bytes(2**16))

    def unmount(self) -> None:
        run_mount("umount", "-l", str(self.mount_point))

    def list_checkpoints(self) -> list[Path]:
        return sorted((self.volume / "checkpoints").glob("step-*"))


FAULTS: dict[str, Callable[[MountedClaim], None]] = {"full": MountedClaim.fill, "unmounted": MountedClaim.unmount}


@pytest.fixture(scope="session")
def tiny_files(tmp_path_factory: pytest.TempPathFactory) -> TinyFiles:
    return build(tmp_path_factory.mktemp("tiny"), rows=64, eval_rows=8)


@pytest.fixture
def job(tmp_path: Path, tiny_files: TinyFiles) -> LocalJob:
    return write_job(tmp_path / "job", tiny_files, numNodes=1, training=TRAINING)


@pytest.fixture
def claim(tmp_path: Path, job: LocalJob) -> Iterator[MountedClaim]:
    claim = MountedClaim(tmp_path / "volume", job.output)
    claim.volume.mkdir()
    claim.mount_point.mkdir(parents=True)
    try:
        run_mount("mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(claim.volume))
    except (subprocess.CalledProcessError, FileNotFoundError) as error:
        pytest.skip(f"this test may not mount a tmpfs: {error}")
    run_mount("mount", "--bind", str(claim.volume), str(claim.mount_point))
    yield claim
    with suppress(subprocess.CalledProcessError):
        claim.unmount()
    run_mount("umount", "-l", str(claim.volume))


def run_mount(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)


@pytest.mark.parametrize("seed", mark_long(SEEDS, SEEDS[1:], "repeats another run at another step"))
@pytest.mark.parametrize("fault", FAULTS)
def test_a_lost_claim_costs_no_checkpoint(job: LocalJob, claim: MountedClaim, fault: str, seed: int) -> None:
    step = random.Random(f"{fault} {seed}").randrange(5, 38)
    process = job.start("--logs")
    job.wait_for_step(step, node_rank=0)
    newest = claim.list_checkpoints()[-1].name

    FAULTS[fault](claim)
    code, output = wait_for_exit(process)

    last = job.status.attempts[-1]
    reported = [attempt for attempt in job.status.attempts if attempt.state is not AttemptState.SUCCEEDED]
    assert code == 0 or last.reason in ("StorageFault", "DiskFull"), output
    for attempt in reported:
        assert attempt.reason in ("StorageFault", "DiskFull"), output
        assert str(job.output) in attempt.message, output
    checkpoint = claim.list_checkpoints()[-1]
    assert checkpoint.name >= newest
    for name, size in json.loads((checkpoint / "manifest.json").read_text())["files"].items():
        assert (checkpoint / name).stat().st_size == size, name
    assert "Traceback" not in output or "warning: tensorboard is incomplete" in output or reported, output


def test_training_goes_on_while_the_claim_is_full(tmp_path: Path, tiny_files: TinyFiles, claim: MountedClaim) -> None:
    """Only the next save frees space; everything that shows progress is a warning until then."""
    training = {**TRAINING, "maxSteps": 160, "saveSteps": 50}
    job = write_job(tmp_path / "job", tiny_files, numNodes=1, training=training)
    process = job.start("--logs")
    job.wait_for_step(101, node_rank=0)  # two checkpoints
    claim.fill()
    job.wait_for_step(105, node_rank=0)
    (claim.volume / "ballast").unlink()
    code, output = wait_for_exit(process)

    assert code == 0, output
    assert len(job.status.attempts) == 1
    assert "deleted step-" not in output
