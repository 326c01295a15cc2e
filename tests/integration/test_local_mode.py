"""Tests of `finetune run` with real supervisors and trainers as local processes."""

import json
import os
import re
import shutil
import signal
import sys
from pathlib import Path

import pytest

from finetune_api.v1alpha1.status import AttemptState
from testing.fakes.unreadable_file import UNREADABLE_FILE
from testing.models.tiny_text import TinyFiles, build
from testing.processes.forks.fork_server import FOLDER as FORKS
from testing.processes.local_mode import LocalJob, wait_for_exit, wait_for_processes_to_end, write_job

pytestmark = pytest.mark.slow

FAULT_INJECTION = Path(__file__).parents[2] / "testing/fakes/inject"
LONG_TRAINING = {"maxSteps": 60, "saveSteps": 5, "learningRate": 1e-3, "globalBatchSize": 4}
INTERRUPTED_TRAINING = {**LONG_TRAINING, "maxSteps": 30}


@pytest.fixture(scope="session")
def tiny_files(tmp_path_factory: pytest.TempPathFactory) -> TinyFiles:
    return build(tmp_path_factory.mktemp("tiny"), rows=256, eval_rows=40)


def test_job_with_two_nodes_completes(tmp_path: Path, tiny_files: TinyFiles) -> None:
    job = write_job(tmp_path, tiny_files)
    (tmp_path / "dataclasses.py").write_text("raise SystemExit('imported from the working directory')")

    code, output = job.run()

    assert code == 0, output
    assert "Complete: 6 steps" in output
    assert "the result is in output/default/first/result" in output
    assert (job.output / "result/adapter_model.safetensors").is_file()
    assert (job.output / "logs/attempt-0/node-1.log").is_file()
    assert job.status.batch is not None
    assert (job.status.batch.world_size, job.status.batch.effective) == (2, 4)
    wait_for_processes_to_end(tmp_path)
    code, output = job.run()
    assert (code, "Complete already" in output) == (0, True), output
    assert len(job.status.attempts) == 1


def test_killed_rank_restarts_all_nodes_once_from_the_last_checkpoint(tmp_path: Path, tiny_files: TinyFiles) -> None:
    job = write_job(tmp_path, tiny_files, training=INTERRUPTED_TRAINING)
    process = job.start("--logs")

    os.kill(job.wait_for_step(12, node_rank=1), signal.SIGKILL)
    code, output = wait_for_exit(process)

    assert code == 0, output
    killed, last = job.status.attempts
    assert (killed.reason, killed.node_rank, killed.rank, job.status.restarts) == ("RankKilled", 1, 1, 1), output
    assert last.state is AttemptState.SUCCEEDED
    assert last.first_step is not None
    assert last.first_step >= 10
    assert last.first_step % 5 == 0
    assert last.last_step == 30
    assert "RankKilled: node 1 (localhost) rank 1 was ended by SIGKILL; attempt 1 starts" in output
    assert "node-1 | " in output


def test_all_nodes_restart_from_the_last_checkpoint_after_a_hang(tmp_path: Path, tiny_files: TinyFiles) -> None:
    job = write_job(tmp_path, tiny_files, training=INTERRUPTED_TRAINING, restartPolicy={"hangTimeoutSeconds": 10})
    process = job.start("--logs")

    os.kill(job.wait_for_step(12, node_rank=1), signal.SIGSTOP)
    code, output = wait_for_exit(process)

    assert code == 0, output
    hung, last = job.status.attempts
    assert (hung.reason, hung.node_rank, hung.rank, job.status.restarts) == ("Hang", 1, 1, 1), output
    assert "Hang: node 1 (localhost): rank 1 is stopped by a signal (SIGSTOP): no heartbeat for" in output
    # rank 0 may lose its connection before its own node detects the hang
    assert {evidence.error_type for evidence in hung.evidence if not evidence.victim} <= {"Hang", ""}, hung.evidence
    assert last.first_step is not None
    assert last.first_step >= 10
    assert last.last_step == 30
    wait_for_processes_to_end(tmp_path)


def test_two_out_of_memory_repairs_do_not_change_the_losses(tmp_path: Path, tiny_files: TinyFiles) -> None:
    training = {"maxSteps": 8, "saveSteps": 3, "learningRate": 1e-2, "perDeviceTrainBatchSize": 4}
    reference = write_job(tmp_path / "reference", tiny_files, training=training)
    job = write_job(
        tmp_path / "job",
        tiny_files,
        training={**training, "perDeviceTrainBatchSize": "auto", "globalBatchSize": 8},
        env=build_fault_variables(OOM_ABOVE_SAMPLES="1", PASSES_BEFORE_FAULT="5"),
    )

    for each in (reference, job):
        code, output = each.run("--trust")  # PYTHONPATH
        assert code == 0, output

    first, second, last = job.status.attempts
    assert (first.reason, first.action, second.action) == ("CudaOutOfMemory", "Repair", "Repair"), output
    log = (job.output / "logs/attempt-0/node-0.log").read_text()
    assert re.search(r"perDeviceTrainBatchSize auto: 4, forecast to need .*; it is the largest possible size", log), log
    assert "at step 5 with a micro-batch of 4 sequences in 1 x " in first.message
    assert "perDeviceTrainBatchSize 4 -> 2, gradientAccumulationSteps 1 -> 2 (effective batch stays 8)" in first.message
    assert last.first_step == 3
    batch = job.status.batch
    assert batch is not None
    assert (batch.per_device_train_batch_size, batch.gradient_accumulation_steps, batch.effective) == (1, 4, 8)
    assert read_losses(job) == pytest.approx(read_losses(reference), rel=1e-4)


def test_an_out_of_memory_repair_resumes_a_lora_job_of_ddp_with_zero3(tmp_path: Path, tiny_files: TinyFiles) -> None:
    training = {"maxSteps": 6, "saveSteps": 3, "learningRate": 1e-2, "gradientCheckpointing": True}
    variables = {"OOM_ABOVE_SAMPLES": "0", "OOM_BUT_WITH_DEEPSPEED": "1", "PASSES_BEFORE_FAULT": "5"}
    job = write_job(
        tmp_path,
        tiny_files,
        training={**training, "perDeviceTrainBatchSize": 1, "globalBatchSize": 2},
        env=build_fault_variables(**variables, PYTORCH_ALLOC_CONF="expandable_segments:True"),
    )

    code, output = job.run("--trust")  # PYTHONPATH

    assert code == 0, output
    failed, last = job.status.attempts
    assert (failed.reason, failed.action) == ("CudaOutOfMemory", "Repair"), output
    assert "deepspeed preset none -> zero3" in failed.message
    assert (last.first_step, last.last_step) == (3, 6), output
    losses = read_losses(job)
    assert len(losses) == 6
    assert losses[-1] < losses[0]


def build_fault_variables(**variables: str) -> list[dict[str, str]]:
    """Return variables of a job that inject faults into its ranks."""
    folders = (FORKS, FAULT_INJECTION, *map(Path, filter(None, sys.path)))
    variables["PYTHONPATH"] = os.pathsep.join(str(folder.resolve()) for folder in folders)
    return [{"name": name, "value": text} for name, text in variables.items()]


def read_losses(job: LocalJob) -> list[float]:
    log = json.loads((job.output / "result/trainer_state.json").read_text())["log_history"]
    return [entry["loss"] for entry in log if "loss" in entry]


def test_early_stopping_state_is_resumed_from_a_checkpoint_saved_on_ctrl_c(
    tmp_path: Path, tiny_files: TinyFiles
) -> None:
    dataset = {"train": [{"name": "/data/train.jsonl"}], "eval": [{"name": "/data/eval.jsonl#4"}], "maxLength": 256}
    early_stopping = {"evalSteps": 5, "earlyStoppingPatience": 8, "earlyStoppingThreshold": 100}
    job = write_job(
        tmp_path, tiny_files, dataset=dataset, training={**LONG_TRAINING, "saveSteps": 1000, **early_stopping}
    )
    process = job.start()

    job.wait_for_step(8, node_rank=0)
    os.killpg(process.pid, signal.SIGINT)
    code, output = wait_for_exit(process)

    assert code == 130, output
    assert "Suspended: the same command again resumes from step-000000" in output
    saved = job.status.progress
    assert saved is not None
    assert saved.step >= 8
    assert saved.last_checkpoint == f"step-{saved.step:08d}"
    wait_for_processes_to_end(tmp_path)

    code, output = job.run()

    assert code == 0, output
    assert [record.state for record in job.status.attempts] == [AttemptState.STOPPED, AttemptState.SUCCEEDED]
    assert job.status.attempts[1].first_step == saved.step
    assert job.status.restarts == 0
    # nine evaluations: one after step 5 and eight without improvement, one or two of which precede the stop
    assert "stopped early at step 45 of 60: 8 evaluations without a better eval_loss by more than 100" in output
    assert job.status.display is not None
    assert job.status.display.progress == "stopped early 45/60"


def test_io_error_when_reading_a_data_file_is_retried(tmp_path: Path, tiny_files: TinyFiles) -> None:
    data = shutil.copytree(tiny_files.train.parent, tmp_path / "data")
    (data / "train.jsonl").unlink()
    (data / "train.jsonl").symlink_to(UNREADABLE_FILE)
    rows = TinyFiles(data / "model", data / "train.jsonl", data / "eval.jsonl")
    job = write_job(tmp_path, rows, numNodes=1, restartPolicy={"maxRestarts": 1})

    code, output = job.run()

    assert code == 1, output
    assert [record.reason for record in job.status.attempts] == ["StorageFault", "StorageFault"]
    (verdict,) = (line for line in output.splitlines() if line.startswith("Failed: "))
    assert "train.jsonl cannot be read: Input/output error" in verdict


def test_nodes_save_a_checkpoint_and_exit_when_finetune_run_is_killed(tmp_path: Path, tiny_files: TinyFiles) -> None:
    job = write_job(tmp_path, tiny_files, training={**LONG_TRAINING, "maxSteps": 2000, "saveSteps": 1000})
    process = job.start()

    job.wait_for_step(3, node_rank=0)
    process.kill()
    wait_for_exit(process)
    wait_for_processes_to_end(tmp_path)

    assert list((job.output / "checkpoints").glob("step-*"))
    assert "stop requested" in (job.output / "logs/attempt-0/node-0.log").read_text()
