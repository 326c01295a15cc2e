"""`finetune run`: real supervisors, torchrun and training, as processes of this machine."""

import json
import os
import re
import shutil
import signal
import sys
from pathlib import Path

import pytest

from finetune_api.v1alpha1.status import AttemptState
from testing.fakes.unreadable_file import UNREADABLE
from testing.models.tiny_text import Tiny, build
from testing.processes.local_mode import LocalJob, finish, wait_until_nothing_runs, write_job

pytestmark = pytest.mark.slow

INJECT = Path(__file__).parents[2] / "testing/fakes/inject"
LONG = {"maxSteps": 60, "saveSteps": 5, "learningRate": 1e-3, "globalBatchSize": 4}


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return build(tmp_path_factory.mktemp("tiny"), rows=256, eval_rows=40)


def test_a_job_of_two_nodes_completes(tmp_path: Path, tiny: Tiny) -> None:
    job = write_job(tmp_path, tiny)

    code, said = job.run()

    assert code == 0, said
    assert "Complete: 6 steps" in said
    assert "the result is in output/default/first/result" in said
    assert (job.output / "result/adapter_model.safetensors").is_file()
    assert (job.output / "logs/attempt-0/node-1.log").is_file()
    assert job.status.batch is not None
    assert (job.status.batch.world_size, job.status.batch.effective) == (2, 4)
    wait_until_nothing_runs(tmp_path)
    code, said = job.run()
    assert (code, "Complete already" in said) == (0, True), said
    assert len(job.status.attempts) == 1


def test_a_killed_rank_is_one_restart_of_all_nodes_from_the_last_checkpoint(tmp_path: Path, tiny: Tiny) -> None:
    job = write_job(tmp_path, tiny, training=LONG)
    process = job.start("--logs")

    os.kill(job.wait_for_step(12, node_rank=1), signal.SIGKILL)
    code, said = finish(process)

    assert code == 0, said
    killed, last = job.status.attempts
    assert (killed.reason, killed.node_rank, killed.rank, job.status.restarts) == ("RankKilled", 1, 1, 1), said
    assert last.state is AttemptState.SUCCEEDED
    assert last.first_step is not None
    assert last.first_step >= 10
    assert last.first_step % 5 == 0
    assert last.last_step == 60
    assert "RankKilled: node 1 (localhost) rank 1 was ended by SIGKILL; attempt 1 starts" in said
    assert "node-1 | " in said


def test_a_rank_that_hangs_is_named_and_all_go_on_from_the_last_checkpoint(tmp_path: Path, tiny: Tiny) -> None:
    job = write_job(tmp_path, tiny, training=LONG, restartPolicy={"hangTimeoutSeconds": 20})
    process = job.start("--logs")

    os.kill(job.wait_for_step(12, node_rank=1), signal.SIGSTOP)
    code, said = finish(process)

    assert code == 0, said
    hung, last = job.status.attempts
    assert (hung.reason, hung.node_rank, hung.rank, job.status.restarts) == ("Hang", 1, 1, 1), said
    assert "Hang: node 1 (localhost): rank 1 is stopped by a signal (SIGSTOP): no sign of life for" in said
    assert {evidence.error_type for evidence in hung.evidence} <= {"Hang", ""}, hung.evidence
    assert last.first_step is not None
    assert last.first_step >= 10
    assert last.last_step == 60
    wait_until_nothing_runs(tmp_path)


def test_a_job_that_runs_out_of_gpu_memory_fits_after_two_repairs_and_learns_the_same(
    tmp_path: Path, tiny: Tiny
) -> None:
    training = {"maxSteps": 8, "saveSteps": 3, "learningRate": 1e-2, "perDeviceTrainBatchSize": 4}
    whole = write_job(tmp_path / "whole", tiny, training=training)
    path = os.pathsep.join([str(INJECT), *(str(Path(each).resolve()) for each in sys.path if each)])
    env = {"PYTHONPATH": path, "MOST_SAMPLES": "1", "FINE_PASSES": "4"}
    job = write_job(
        tmp_path / "job",
        tiny,
        training={**training, "perDeviceTrainBatchSize": "auto", "globalBatchSize": 8},
        env=[{"name": name, "value": text} for name, text in env.items()],
    )

    for each in (whole, job):
        code, said = each.run()
        assert code == 0, said

    first, second, last = job.status.attempts
    assert (first.reason, first.action, second.action) == ("CudaOutOfMemory", "Repair", "Repair"), said
    log = (job.output / "logs/attempt-0/node-0.log").read_text()
    assert re.search(r"perDeviceTrainBatchSize auto: 4, forecast to need .*; it is all that a rank has", log), log
    assert "at step 5 with a micro-batch of 4 x " in first.message
    assert "perDeviceTrainBatchSize 4 -> 2, gradientAccumulationSteps 1 -> 2 (effective batch stays 8)" in first.message
    assert last.first_step == 3
    batch = job.status.batch
    assert batch is not None
    assert (batch.per_device_train_batch_size, batch.gradient_accumulation_steps, batch.effective) == (1, 4, 8)
    assert losses(job) == pytest.approx(losses(whole), rel=1e-4)


def losses(job: LocalJob) -> list[float]:
    log = json.loads((job.output / "result/trainer_state.json").read_text())["log_history"]
    return [entry["loss"] for entry in log if "loss" in entry]


def test_ctrl_c_saves_and_the_same_command_continues_and_so_does_patience(tmp_path: Path, tiny: Tiny) -> None:
    rows = {"train": [{"name": "/data/train.jsonl"}], "eval": [{"name": "/data/eval.jsonl#4"}], "maxLength": 256}
    never_better = {"evalSteps": 5, "earlyStoppingPatience": 8, "earlyStoppingThreshold": 100}
    job = write_job(tmp_path, tiny, dataset=rows, training={**LONG, "saveSteps": 1000, **never_better})
    process = job.start()

    job.wait_for_step(8, node_rank=0)
    os.killpg(process.pid, signal.SIGINT)
    code, said = finish(process)

    assert code == 130, said
    assert "Suspended: the same command again resumes from step-000000" in said
    saved = job.status.progress
    assert saved is not None
    assert saved.step >= 8
    assert saved.last_checkpoint == f"step-{saved.step:08d}"
    wait_until_nothing_runs(tmp_path)

    code, said = job.run()

    assert code == 0, said
    assert [record.state for record in job.status.attempts] == [AttemptState.STOPPED, AttemptState.SUCCEEDED]
    assert job.status.attempts[1].first_step == saved.step
    assert job.status.restarts == 0
    # the first evaluation, after step 5, and eight more, of which one or two were before the stop
    assert "stopped early at step 45 of 60: 8 evaluations without a better eval_loss by more than 100" in said
    assert job.status.display is not None
    assert job.status.display.progress == "stopped early 45/60"


def test_a_malformed_row_ends_the_job_at_once_and_can_be_mended(tmp_path: Path, tiny: Tiny) -> None:
    data = shutil.copytree(tiny.train.parent, tmp_path / "data")
    rows = (data / "train.jsonl").read_text().splitlines()
    (data / "train.jsonl").write_text("\n".join([*rows[:2], '{"messages": [', *rows[3:]]))
    job = write_job(tmp_path, Tiny(data / "model", data / "train.jsonl", data / "eval.jsonl"))

    code, said = job.run()

    assert code == 1, said
    assert [record.reason for record in job.status.attempts] == ["DatasetError"]
    verdicts = [line for line in said.splitlines() if line.startswith("Failed: ")]
    assert len(verdicts) == 1
    assert "train.jsonl" in verdicts[0]
    assert "line 3" in verdicts[0]
    assert job.status.restarts == 0


def test_rows_that_a_file_system_does_not_give_are_asked_for_again(tmp_path: Path, tiny: Tiny) -> None:
    data = shutil.copytree(tiny.train.parent, tmp_path / "data")
    (data / "train.jsonl").unlink()
    (data / "train.jsonl").symlink_to(UNREADABLE)
    rows = Tiny(data / "model", data / "train.jsonl", data / "eval.jsonl")
    job = write_job(tmp_path, rows, restartPolicy={"maxRestarts": 1, "backoffSeconds": 1})

    code, said = job.run()

    assert code == 1, said
    assert [record.reason for record in job.status.attempts] == ["StorageFault", "StorageFault"]
    assert "train.jsonl cannot be read: Input/output error" in said


def test_a_killed_command_takes_its_nodes_along_after_they_saved(tmp_path: Path, tiny: Tiny) -> None:
    job = write_job(tmp_path, tiny, training={**LONG, "maxSteps": 2000, "saveSteps": 1000})
    process = job.start()

    job.wait_for_step(3, node_rank=0)
    process.kill()
    finish(process)
    wait_until_nothing_runs(tmp_path)

    assert list((job.output / "checkpoints").glob("step-*"))
    assert "asked to stop" in (job.output / "logs/attempt-0/node-0.log").read_text()
