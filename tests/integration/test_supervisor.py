"""Tests of termination messages, stop requests and bit-exact resumption with real supervisor processes."""

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
from testing.models import tiny_text
from testing.processes.supervisors import SupervisorJob, SupervisorPod, stop

pytestmark = pytest.mark.slow

STEPS = 24
RANKS = 3


@pytest.fixture(scope="module")
def tiny_files(tmp_path_factory: pytest.TempPathFactory) -> tiny_text.TinyFiles:
    return tiny_text.build(tmp_path_factory.mktemp("tiny"), rows=100, eval_rows=10)


def build_spec(tiny_files: tiny_text.TinyFiles, **fields: Any) -> dict[str, Any]:
    """Build a spec with dropout, which depends on random states, and with a short last step in each epoch.

    It has three ranks, because the sum of three gradients depends on their order, unlike the sum of two.
    """
    return {
        "model": {"name": str(tiny_files.model)},
        "dataset": {"train": [{"name": str(tiny_files.train)}], "numWorkers": 0},
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
def uninterrupted_run(
    tiny_files: tiny_text.TinyFiles, tmp_path_factory: pytest.TempPathFactory
) -> tuple[SupervisorJob, SupervisorPod]:
    job = SupervisorJob(
        tmp_path_factory.mktemp("uninterrupted"), build_spec(tiny_files), ranks_per_node=RANKS, starts_interpreters=True
    )
    (pod,) = job.run()
    assert pod.process.returncode == 0, pod.log
    return job, pod


def read_checkpoint_digests(job: SupervisorJob) -> dict[str, str]:
    """Return the SHA-256 digests of weights, optimizer, scheduler and random states after the last step."""
    folder = job.output_folder / "checkpoints" / f"step-{STEPS:08d}"
    names = [
        "adapter_model.safetensors",
        *(f"state/rank-{rank:05d}-000.safetensors" for rank in range(RANKS)),
        "scheduler.pt",
        *(f"random-{rank:05d}.pt" for rank in range(RANKS)),
    ]
    return {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in names}


def read_losses(job: SupervisorJob) -> list[float]:
    log = json.loads((job.output_folder / "result" / "trainer_state.json").read_text())["log_history"]
    return [entry["loss"] for entry in log if "loss" in entry]


def test_successful_node_writes_a_final_termination_message(
    uninterrupted_run: tuple[SupervisorJob, SupervisorPod],
) -> None:
    _, pod = uninterrupted_run

    termination = pod.termination

    assert termination is not None
    assert (termination.final, termination.outcome, termination.phase, termination.first_step) == (
        True,
        Outcome.SUCCEEDED,
        "done",
        0,
    )
    assert isinstance(termination.progress, Progress)
    assert (termination.progress.step, termination.progress.total_steps) == (STEPS, STEPS)
    assert termination.progress.last_checkpoint == f"step-{STEPS:08d}"
    assert termination.peak_memory_bytes is not None
    assert termination.peak_memory_bytes > 100_000_000


def test_rank_zero_logs_the_training_plan_and_every_step(
    uninterrupted_run: tuple[SupervisorJob, SupervisorPod],
) -> None:
    _, pod = uninterrupted_run

    assert "effective batch: 3 x 2 x 3 = 18 (per device x accumulation x ranks)" in pod.log
    assert f"steps: {STEPS} (6 per epoch of 100 samples, 4 epochs)" in pod.log
    assert "trainable parameters (lora): 49,152 of 314,208" in pod.log
    assert "devices: 3 x cpu on 1 node(s), gloo, float32" in pod.log
    assert len(re.findall(r"^step \d+/24  loss \d\.\d{4}  grad_norm ", pod.log, re.MULTILINE)) == STEPS
    assert "Warning" not in pod.log


def test_output_folder_has_the_documented_layout_and_is_world_readable(
    uninterrupted_run: tuple[SupervisorJob, SupervisorPod],
) -> None:
    job, pod = uninterrupted_run
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


def test_attempt_with_a_published_result_exits_immediately(
    uninterrupted_run: tuple[SupervisorJob, SupervisorPod],
) -> None:
    job, _ = uninterrupted_run

    (pod,) = job.run(attempt=1)

    assert pod.process.returncode == 0, pod.log
    assert "nothing is left to do" in pod.log
    assert pod.termination is not None
    assert pod.termination.outcome is Outcome.SUCCEEDED


def test_killed_stopped_and_resumed_run_equals_an_uninterrupted_run(
    tiny_files: tiny_text.TinyFiles, uninterrupted_run: tuple[SupervisorJob, SupervisorPod], tmp_path: Path
) -> None:
    job = SupervisorJob(tmp_path, build_spec(tiny_files), ranks_per_node=RANKS)

    (killed,) = job.start()
    killed.wait_for_step(6)
    os.kill(killed.heartbeats()[1]["pid"], signal.SIGKILL)
    assert killed.wait() == 1, killed.log
    check_killed_pod(killed)
    newest_step = find_newest_checkpoint_step(job)

    (stopped,) = job.start(attempt=1)
    stopped.wait_for_step(9)
    check_running_pod(stopped)
    stop(stopped)
    assert stopped.wait() == 143, stopped.log
    step = check_stopped_pod(stopped, job)
    assert stopped.termination is not None
    assert stopped.termination.first_step == newest_step

    (resumed,) = job.run(attempt=2)
    assert resumed.process.returncode == 0, resumed.log
    assert resumed.termination is not None
    assert resumed.termination.first_step == step
    assert read_checkpoint_digests(job) == read_checkpoint_digests(uninterrupted_run[0])
    assert read_losses(job) == read_losses(uninterrupted_run[0])


def find_newest_checkpoint_step(job: SupervisorJob) -> int:
    """Return the step of the newest checkpoint, even if it was completed after a rank was killed."""
    return max(int(path.name.removeprefix("step-")) for path in (job.output_folder / "checkpoints").glob("step-*"))


def check_killed_pod(pod: SupervisorPod) -> None:
    termination = pod.termination
    assert termination is not None
    assert (termination.outcome, termination.error_type, termination.rank, termination.local_rank) == (
        Outcome.FAILED,
        "RankKilled",
        1,
        1,
    ), termination
    assert (termination.signal, termination.exit_code, termination.victim) == (9, -9, False)
    assert termination.phase in ("save", "train")  # the rank is killed right after a checkpoint was saved
    assert termination.progress is not None
    # The rank is killed at step 6 or slightly later.
    assert termination.progress.last_checkpoint in ("step-00000004", "step-00000008")


def check_running_pod(pod: SupervisorPod) -> None:
    status = json.loads(pod.get("/status"))
    assert status["phase"] in ("save", "train")  # a checkpoint may be in progress
    assert (status["outcome"], status["worldSize"], status["attempt"]) == ("running", RANKS, 1)
    assert status["progress"]["step"] >= 9
    assert [rank["rank"] for rank in status["ranks"]] == [0, 1, 2]
    assert 'finetune_total_steps{namespace="default",job="tiny",attempt="1",node_rank="0"} 24' in pod.get("/metrics")
    running = pod.termination
    assert running is not None
    assert not running.final


def check_stopped_pod(pod: SupervisorPod, job: SupervisorJob) -> int:
    """Check a stopped pod and return the step of its checkpoint."""
    termination = pod.termination
    assert termination is not None
    assert (termination.final, termination.outcome) == (True, Outcome.STOPPED), termination
    assert termination.progress is not None
    step = termination.progress.step
    assert termination.progress.last_checkpoint == f"step-{step:08d}"
    assert (job.output_folder / "checkpoints" / f"step-{step:08d}" / "manifest.json").is_file()
    assert not (job.output_folder / "result").exists()
    return step


def test_stopping_one_node_stops_both_nodes_after_one_checkpoint(
    tiny_files: tiny_text.TinyFiles, tmp_path: Path
) -> None:
    """A drain stops only one pod, but a checkpoint needs all ranks."""
    job = SupervisorJob(tmp_path, build_spec(tiny_files), nodes=2, ranks_per_node=1)

    first, second = job.start()
    second.wait_for_step(2)
    stop(second)

    assert (first.wait(), second.wait()) == (143, 143), first.log + second.log
    checkpoints = {read_last_checkpoint(first), read_last_checkpoint(second)}
    assert len(checkpoints) == 1
    assert (job.output_folder / "checkpoints" / checkpoints.pop() / "manifest.json").is_file()


def read_last_checkpoint(stopped_pod: SupervisorPod) -> str:
    termination = stopped_pod.termination
    assert termination is not None
    assert termination.outcome is Outcome.STOPPED, termination
    assert termination.progress is not None
    assert termination.progress.last_checkpoint == f"step-{termination.progress.step:08d}"
    return termination.progress.last_checkpoint


def test_malformed_row_is_a_permanent_failure_with_file_line_and_column(
    tiny_files: tiny_text.TinyFiles, tmp_path: Path
) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(tiny_files.train.read_text() + '{"messages": [{"role": "user", "content": 7}]}\n')
    job = SupervisorJob(tmp_path / "job", build_spec(tiny_files, dataset={"train": [{"name": str(rows)}]}))

    (pod,) = job.run()

    assert pod.process.returncode == 2, pod.log
    termination = pod.termination
    assert termination is not None
    assert (termination.outcome, termination.error_type, termination.victim) == (Outcome.FAILED, "DatasetError", False)
    assert termination.message == f"{rows} line 101, column messages[0].content: expected text, found a number (7)"
    assert "DatasetError" in termination.stack
    assert not (job.output_folder / "job.json").exists()


def test_ranks_exit_when_the_supervisor_is_killed(tiny_files: tiny_text.TinyFiles, tmp_path: Path) -> None:
    (pod,) = SupervisorJob(tmp_path, build_spec(tiny_files), starts_interpreters=True).start()
    pod.wait_for_step(1)
    ranks = [heartbeat["pid"] for heartbeat in pod.heartbeats().values()]

    pod.process.kill()
    pod.process.wait()

    assert len(ranks) == 2
    assert all(wait_for_process_exit(pid) for pid in ranks)
    termination = pod.termination
    assert termination is not None
    assert (termination.final, termination.outcome) == (False, Outcome.RUNNING)


def wait_for_process_exit(pid: int) -> bool:
    """Wait for the process and return whether it exits within ten seconds."""
    for _ in range(200):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.05)
    return False
