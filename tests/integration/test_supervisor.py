"""Supervisor, torchrun and training as the operator starts them: what a node says, and what a restart makes of it."""

import hashlib
import json
import os
import re
import signal
import stat
import time
from pathlib import Path
from typing import Any

import pytest

from finetune_api.termination import Outcome
from finetune_api.v1alpha1.status import Progress
from testing.models import tiny_text as tiny
from testing.processes.supervisors import Job, Pod, stop

pytestmark = pytest.mark.slow

STEPS = 24
RANKS = 3


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tiny.Tiny:
    return tiny.build(tmp_path_factory.mktemp("tiny"), rows=100, eval_rows=10)


def spec(files: tiny.Tiny, **fields: Any) -> dict[str, Any]:
    """Dropout, so that every rank's random generator matters; six steps to an epoch, the last one short.

    Three ranks, because the sum of two gradients is the same in either order, and the sum of three is not.
    """
    return {
        "model": {"name": str(files.model)},
        "dataset": {"train": [{"name": str(files.train)}], "numWorkers": 0},
        "sft": {},
        "lora": {"r": 16, "loraDropout": 0.1},
        "training": {
            "globalBatchSize": 18,
            "perDeviceTrainBatchSize": 3,
            "maxSteps": STEPS,
            "saveSteps": 4,
            "learningRate": 0.01,
        },
        "numNodes": 1,
        "nprocPerNode": RANKS,
        "output": {"persistentVolumeClaim": {"claimName": "unused"}},
        **fields,
    }


@pytest.fixture(scope="module")
def undisturbed(files: tiny.Tiny, tmp_path_factory: pytest.TempPathFactory) -> tuple[Job, Pod]:
    job = Job(tmp_path_factory.mktemp("undisturbed"), spec(files), ranks_per_node=RANKS)
    (pod,) = job.run()
    assert pod.process.returncode == 0, pod.log
    return job, pod


def state_of(job: Job) -> dict[str, str]:
    """Digests of weights, optimizer, schedule and random generators at the last step."""
    folder = job.output_folder / "checkpoints" / f"step-{STEPS:08d}"
    names = [
        "adapter_model.safetensors",
        "training-state.safetensors",
        "scheduler.pt",
        *(f"random-{rank:05d}.pt" for rank in range(RANKS)),
    ]
    return {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in names}


def losses_of(job: Job) -> list[float]:
    log = json.loads((job.output_folder / "result" / "trainer_state.json").read_text())["log_history"]
    return [entry["loss"] for entry in log if "loss" in entry]


def test_the_node_tells_its_success(undisturbed: tuple[Job, Pod]) -> None:
    _, pod = undisturbed

    said = pod.termination

    assert said is not None
    assert (said.final, said.outcome, said.phase, said.first_step) == (True, Outcome.SUCCEEDED, "done", 0)
    assert isinstance(said.progress, Progress)
    assert (said.progress.step, said.progress.total_steps) == (STEPS, STEPS)
    assert said.progress.last_checkpoint == f"step-{STEPS:08d}"
    assert said.peak_memory_bytes is not None
    assert said.peak_memory_bytes > 100_000_000


def test_rank_zero_says_what_will_be_trained_and_every_step(undisturbed: tuple[Job, Pod]) -> None:
    _, pod = undisturbed

    assert "effective batch: 3 x 2 x 3 = 18 (per device x accumulation x ranks)" in pod.log
    assert f"steps: {STEPS} (6 per epoch of 100 samples, 4 epochs)" in pod.log
    assert "trainable parameters, of lora: 49,152 of 314,208" in pod.log
    assert "devices: 3 x cpu on 1 node(s), gloo, float32" in pod.log
    assert len(re.findall(r"^step \d+/24  loss \d\.\d{4}  grad_norm ", pod.log, re.MULTILINE)) == STEPS
    assert "Warning" not in pod.log


def test_the_output_is_laid_out_as_promised_and_readable(undisturbed: tuple[Job, Pod]) -> None:
    job, pod = undisturbed
    output = job.output_folder

    assert sorted(path.name for path in output.iterdir()) == ["checkpoints", "job.json", "logs", "result"]
    assert sorted(path.name for path in (output / "checkpoints").iterdir()) == ["step-00000020", "step-00000024"]
    assert {"adapter_model.safetensors", "adapter_config.json", "tokenizer.json", "SUCCESS"} <= {
        path.name for path in (output / "result").iterdir()
    }
    assert json.loads((output / "result" / "SUCCESS").read_text())["uid"] == job.uid
    assert (output / "logs" / "attempt-0" / "node-0.log").read_text() == pod.log
    for path in output.rglob("*"):
        assert path.is_dir() or stat.S_IMODE(path.stat().st_mode) & 0o004, path


def test_an_attempt_that_finds_the_result_ends_at_once(undisturbed: tuple[Job, Pod]) -> None:
    job, _ = undisturbed

    (pod,) = job.run(attempt=1)

    assert pod.process.returncode == 0, pod.log
    assert "nothing is left to do" in pod.log
    assert pod.termination is not None
    assert pod.termination.outcome is Outcome.SUCCEEDED


def test_killed_then_stopped_then_resumed_is_as_if_nothing_had_happened(
    files: tiny.Tiny, undisturbed: tuple[Job, Pod], tmp_path: Path
) -> None:
    job = Job(tmp_path, spec(files), ranks_per_node=RANKS)

    (killed,) = job.start()
    killed.wait_for_step(6)
    os.kill(killed.heartbeats()[1]["pid"], signal.SIGKILL)
    assert killed.wait() == 1, killed.log
    check_killed(killed)
    saved = newest_checkpoint(job)

    (stopped,) = job.start(attempt=1)
    stopped.wait_for_step(9)
    check_status(stopped)
    stop(stopped)
    assert stopped.wait() == 143, stopped.log
    step = check_stopped(stopped, job)
    assert stopped.termination is not None
    assert stopped.termination.first_step == saved

    (resumed,) = job.run(attempt=2)
    assert resumed.process.returncode == 0, resumed.log
    assert resumed.termination is not None
    assert resumed.termination.first_step == step
    assert state_of(job) == state_of(undisturbed[0])
    assert losses_of(job) == losses_of(undisturbed[0])


def newest_checkpoint(job: Job) -> int:
    """The step of it. One that was being saved when a rank died may have become whole."""
    return max(int(path.name.removeprefix("step-")) for path in (job.output_folder / "checkpoints").glob("step-*"))


def check_killed(pod: Pod) -> None:
    said = pod.termination
    assert said is not None
    assert (said.outcome, said.error_type, said.rank, said.local_rank) == (Outcome.FAILED, "RankKilled", 1, 1), said
    assert (said.signal, said.exit_code, said.victim) == (9, -9, False)
    assert said.phase in ("save", "train")  # it is killed as soon as the checkpoint is there
    assert said.progress is not None
    assert said.progress.last_checkpoint in ("step-00000004", "step-00000008")  # step 6, or a little later


def check_status(pod: Pod) -> None:
    told = json.loads(pod.get("/status"))
    assert told["phase"] in ("save", "train")  # some steps save
    assert (told["outcome"], told["worldSize"], told["attempt"]) == ("running", RANKS, 1)
    assert told["progress"]["step"] >= 9
    assert [rank["rank"] for rank in told["ranks"]] == [0, 1, 2]
    assert 'finetune_total_steps{namespace="default",job="tiny",attempt="1",node_rank="0"} 24' in pod.get("/metrics")
    running = pod.termination
    assert running is not None
    assert not running.final


def check_stopped(pod: Pod, job: Job) -> int:
    """Gives the step of the checkpoint that was saved on request."""
    said = pod.termination
    assert said is not None
    assert (said.final, said.outcome) == (True, Outcome.STOPPED), said
    assert said.progress is not None
    step = said.progress.step
    assert said.progress.last_checkpoint == f"step-{step:08d}"
    assert (job.output_folder / "checkpoints" / f"step-{step:08d}" / "manifest.json").is_file()
    assert not (job.output_folder / "result").exists()
    return step


def test_one_node_asked_to_stop_stops_both_with_one_checkpoint(files: tiny.Tiny, tmp_path: Path) -> None:
    """A drain tells one pod only; a checkpoint needs all ranks."""
    job = Job(tmp_path, spec(files), nodes=2, ranks_per_node=1)

    first, second = job.start()
    second.wait_for_step(2)
    stop(second)

    assert (first.wait(), second.wait()) == (143, 143), first.log + second.log
    names = {last_checkpoint(first), last_checkpoint(second)}
    assert len(names) == 1
    assert (job.output_folder / "checkpoints" / names.pop() / "manifest.json").is_file()


def last_checkpoint(stopped: Pod) -> str:
    said = stopped.termination
    assert said is not None
    assert said.outcome is Outcome.STOPPED, said
    assert said.progress is not None
    assert said.progress.last_checkpoint == f"step-{said.progress.step:08d}"
    return said.progress.last_checkpoint


def test_a_malformed_row_fails_for_good_with_file_line_and_column(files: tiny.Tiny, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(files.train.read_text() + '{"messages": [{"role": "user", "content": 7}]}\n')
    job = Job(tmp_path / "job", spec(files, dataset={"train": [{"name": str(rows)}]}))

    (pod,) = job.run()

    assert pod.process.returncode == 2, pod.log
    said = pod.termination
    assert said is not None
    assert (said.outcome, said.error_type, said.victim) == (Outcome.FAILED, "DatasetError", False)
    assert said.message == f"{rows} line 101, column messages[0].content: expected text, found a number (7)"
    assert "DatasetError" in said.stack
    assert not (job.output_folder / "job.json").exists()


def test_a_supervisor_that_is_killed_takes_its_ranks_with_it(files: tiny.Tiny, tmp_path: Path) -> None:
    (pod,) = Job(tmp_path, spec(files)).start()
    pod.wait_for_step(1)
    ranks = [beat["pid"] for beat in pod.heartbeats().values()]

    pod.process.kill()
    pod.process.wait()

    assert len(ranks) == 2
    assert all(ends(pid) for pid in ranks)
    said = pod.termination
    assert said is not None
    assert (said.final, said.outcome) == (False, Outcome.RUNNING)


def ends(pid: int) -> bool:
    """Within ten seconds."""
    for _ in range(200):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.05)
    return False
