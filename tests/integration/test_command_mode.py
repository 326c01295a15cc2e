"""Tests of unmodified user scripts in local mode and under the supervisor bundle."""

import json
import os
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from finetune_api.termination import Outcome
from finetune_api.v1alpha1.status import AttemptState
from testing.models import tiny_text
from testing.processes.local_mode import (
    TIMEOUT_SECONDS,
    LocalJob,
    wait_for_exit,
    wait_for_processes_to_end,
    wait_until,
    write_command_job,
)
from testing.processes.supervisor_file import write_supervisor
from testing.processes.supervisors import SupervisorJob, SupervisorPod, stop

pytestmark = pytest.mark.slow

SCRIPTS = Path(__file__).parents[2] / "testing" / "processes" / "scripts"


def build_ddp_command(*args: str, output_folder: str = "$(FINETUNE_OUTPUT)") -> dict[str, Any]:
    return {"script": "plain_ddp.py", "args": ["--save_dir", output_folder, *args], "workingDir": str(SCRIPTS)}


def find_rank_pids(job: LocalJob) -> list[int]:
    """Return the PIDs of the job's ranks, found by their environment and process names."""
    pids = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            name = (entry / "comm").read_text()
            belongs_to_job = str(job.folder).encode() in (entry / "environ").read_bytes()
        except OSError:
            continue
        if belongs_to_job and name.startswith("rank-"):
            pids.append(int(entry.name))
    return sorted(pids)


def test_exception_of_a_rank_fails_the_job_with_message_and_rank(tmp_path: Path) -> None:
    job = write_command_job(
        tmp_path, build_ddp_command("--raise_on_rank", "3", output_folder=str(tmp_path)), output=None
    )

    code, output = job.run()

    assert code == 1, output
    (record,) = job.status.attempts
    assert (record.reason, record.node_rank, record.rank) == ("UserCodeError", 1, 3), output
    assert "ValueError: row 1 of rank 3 has no label" in record.message
    assert not (tmp_path / "output/default/first").exists()
    assert "the logs are in output/default/first.local/attempt-0" in output


def test_script_resumes_from_its_checkpoint_after_a_rank_is_killed(tmp_path: Path) -> None:
    job = write_command_job(tmp_path, build_ddp_command("--epochs", "4", "--seconds_per_step", "0.4"))
    process = job.start("--logs")

    wait_until(lambda: 1 if (job.output / "model.pt").is_file() else None, "the first checkpoint")
    os.kill(find_rank_pids(job)[-1], signal.SIGKILL)
    code, output = wait_for_exit(process)

    assert code == 0, output
    killed, last = job.status.attempts
    assert (killed.reason, job.status.restarts) == ("RankKilled", 1), output
    assert last.state is AttemptState.SUCCEEDED
    assert output.count("epoch 0 loss") == 1, output
    assert output.count("epoch 3 loss") == 1
    wait_for_processes_to_end(tmp_path)


@dataclass(frozen=True)
class HungScript:
    """A job of a script with a transformers Trainer, whose last rank was stopped after its progress was displayed."""

    job: LocalJob
    displayed_percent: int
    output: str


@pytest.fixture(scope="module")
def hung_script(tmp_path_factory: pytest.TempPathFactory) -> HungScript:
    folder = tmp_path_factory.mktemp("hung")
    files = tiny_text.build(folder / "tiny", rows=8, eval_rows=2)
    command = {"script": "plain_trainer.py", "args": ["/data/model", "$(FINETUNE_OUTPUT)", "60"]}
    policy = {"restartPolicy": {"hangTimeoutSeconds": 10}}
    job = write_command_job(
        folder, {**command, "workingDir": str(SCRIPTS)}, data=files.train.parent, numNodes=1, **policy
    )
    process = job.start()

    def read_displayed_percent() -> int | None:
        display = job.status.display if (job.local_folder / "status.json").is_file() else None
        is_complete = display and display.progress and display.loss and display.eta
        return int(display.progress.partition("%")[0]) if display and is_complete else None

    percent = wait_until(read_displayed_percent, "progress with loss and ETA")
    os.kill(find_rank_pids(job)[-1], signal.SIGSTOP)
    code, output = wait_for_exit(process)
    assert code == 0, output
    return HungScript(job, percent, output)


def test_progress_of_a_script_with_a_transformers_trainer_is_displayed(hung_script: HungScript) -> None:
    progress = hung_script.job.status.progress

    assert 0 < hung_script.displayed_percent < 100
    assert "Complete: 60 steps, loss " in hung_script.output
    assert progress is not None
    assert (progress.step, progress.total_steps) == (60, 60)
    assert progress.learning_rate is not None


def test_command_that_stops_reporting_progress_is_restarted(hung_script: HungScript) -> None:
    hung, last = hung_script.job.status.attempts

    assert (hung.reason, hung.node_rank, last.state) == ("Hang", 0, AttemptState.SUCCEEDED), hung_script.output
    assert "no heartbeat for" in hung.message
    wait_for_processes_to_end(hung_script.job.folder)


@pytest.fixture(scope="module")
def supervisor_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_supervisor(tmp_path_factory.mktemp("image"))


def start_with_bundle(folder: Path, supervisor_bundle: Path, command: dict[str, Any], **fields: Any) -> SupervisorPod:
    """Start a pod with the supervisor bundle and torch, but without the packages of this project."""
    program = (sys.executable, str(supervisor_bundle))
    job = SupervisorJob(
        folder, {"command": command}, program=program, env={"PYTHONPATH": ""}, starts_interpreters=True, **fields
    )
    (pod,) = job.start()
    return pod


@pytest.mark.parametrize("command_type", ["script", "exec"])
def test_bundle_reports_an_exception_of_a_rank(tmp_path: Path, supervisor_bundle: Path, command_type: str) -> None:
    arguments = ["--save_dir", str(tmp_path), "--raise_on_rank", "1"]
    script = {"script": str(SCRIPTS / "plain_ddp.py"), "args": arguments}
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", str(SCRIPTS / "plain_ddp.py")]

    pod = start_with_bundle(
        tmp_path / "job", supervisor_bundle, script if command_type == "script" else {"exec": [*torchrun, *arguments]}
    )

    assert pod.wait() == 1, pod.log
    termination = pod.termination
    assert termination is not None
    assert (termination.outcome, termination.error_type, termination.rank, termination.local_rank) == (
        Outcome.FAILED,
        "ValueError",
        1,
        1,
    ), pod.log
    assert (termination.message, termination.exit_code) == ("row 1 of rank 1 has no label", 1)
    assert "plain_ddp.py" in termination.stack


SAVE_ON_SIGTERM = """
import signal, sys, time
def save(number, frame):
    time.sleep(1.5)
    open(sys.argv[1], "w").close()
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
print("ready", flush=True)
while True:
    time.sleep(0.1)
"""


IMPATIENT_SUPERVISOR = """
import sys
from finetune_supervisor.__main__ import main
if len(sys.argv) == 1:  # not the launcher
    from finetune_supervisor.command_checks import command_checks
    command_checks.GRACE_SECONDS = command_checks.CHECK_INTERVAL_SECONDS = 1.0
sys.exit(main())
"""


@pytest.mark.parametrize("program", ["plain_alone.py", "plain_ddp.py"])
def test_ranks_that_do_not_join_a_process_group_are_reported(tmp_path: Path, program: str) -> None:
    args = [] if program == "plain_alone.py" else ["--save_dir", str(tmp_path / "out"), "--seconds_per_step", "0.5"]
    spec = {"command": {"script": program, "args": args, "workingDir": str(SCRIPTS)}}
    job = SupervisorJob(tmp_path, spec, program=(sys.executable, "-c", IMPATIENT_SUPERVISOR))
    (pod,) = job.start()
    try:
        while not list((pod.folder / "run" / "torchrun").glob("ranks/attempt_0/*")):
            assert pod.process.poll() is None, pod.log
            time.sleep(0.1)
        deadline = time.monotonic() + (30 if program == "plain_alone.py" else 5)
        degraded: list[dict[str, str]] = []
        while not degraded and time.monotonic() < deadline:
            time.sleep(0.2)
            degraded = json.loads(pod.get("/status"))["degraded"]
    finally:
        pod.process.kill()
        pod.process.wait()

    if program == "plain_ddp.py":
        assert degraded == []
    else:
        assert [each["reason"] for each in degraded] == ["RanksAlone"]
        assert "2 of 2 ranks of node 0 (0, 1)" in degraded[0]["message"]
        assert "supervisor: warning: degraded: RanksAlone: 2 of 2 ranks" in pod.log


@pytest.mark.parametrize("command_type", ["script", "exec"])
def test_sigterm_is_forwarded_and_the_program_has_time_to_save(
    tmp_path: Path, supervisor_bundle: Path, command_type: str
) -> None:
    """The exec command is a shell that exits at SIGTERM without forwarding it."""
    script, saved = tmp_path / "save.py", tmp_path / "saved"
    script.write_text(SAVE_ON_SIGTERM)
    launcher = ["/bin/sh", "-c", f"{sys.executable} {script} {saved}; true"]
    command = {"script": str(script), "args": [str(saved)]} if command_type == "script" else {"exec": launcher}
    pod = start_with_bundle(tmp_path / "job", supervisor_bundle, command, ranks_per_node=1)
    wait_until(lambda: 1 if "ready" in pod.log else None, "the script")

    stop(pod)

    assert pod.wait() == 143, pod.log
    assert saved.exists()
    assert pod.termination is not None
    assert (pod.termination.outcome, pod.termination.message) == (Outcome.STOPPED, "stopped on request")


def test_program_that_ignores_sigterm_is_killed_after_the_grace_period(tmp_path: Path, supervisor_bundle: Path) -> None:
    command = {"exec": ["/bin/sh", "-c", "trap '' TERM; echo ready; while :; do sleep 0.2; done"]}
    pod = start_with_bundle(tmp_path / "job", supervisor_bundle, command, grace_seconds=4)
    wait_until(lambda: 1 if "ready" in pod.log else None, "the program")

    started_at = time.monotonic()
    stop(pod)

    assert pod.wait() == 143, pod.log
    assert time.monotonic() - started_at < TIMEOUT_SECONDS / 10
    assert pod.termination is not None
    assert "grace period of 4s" in pod.termination.message


def test_failed_program_is_reported_with_exit_code_and_last_line(tmp_path: Path, supervisor_bundle: Path) -> None:
    script = 'cd "$FINETUNE_OUTPUT" && echo no GPU here >&2; exit 3'  # the folder exists before the program starts
    pod = start_with_bundle(tmp_path / "job", supervisor_bundle, {"exec": ["/bin/sh", "-c", script]})

    assert pod.wait() == 1
    termination = pod.termination
    assert termination is not None
    assert (termination.error_type, termination.exit_code) == ("RankExited", 3)
    assert termination.message == "exited with code 3; its last line: no GPU here"


def test_missing_script_is_reported_as_invalid_spec(tmp_path: Path, supervisor_bundle: Path) -> None:
    pod = start_with_bundle(tmp_path / "job", supervisor_bundle, {"script": "train.py", "workingDir": "/nowhere"})

    assert pod.wait() == 2
    assert pod.termination is not None
    assert pod.termination.error_type == "InvalidSpec"
    assert "spec.command.workingDir: /nowhere" in pod.termination.message


def test_image_without_torch_and_torchrun_is_rejected(tmp_path: Path, supervisor_bundle: Path) -> None:
    """The interpreter runs without site-packages, like the python3 of a base image."""
    (tmp_path / "train.py").touch()
    program = (str(Path(sys.executable).resolve()), "-S", str(supervisor_bundle))
    job_spec = {"command": {"script": str(tmp_path / "train.py")}}

    (pod,) = SupervisorJob(tmp_path / "job", job_spec, program=program, env={"PYTHONPATH": "", "PATH": "/bin"}).run()

    assert pod.process.returncode == 2, pod.log
    assert pod.termination is not None
    assert "has no torch, and there is no torchrun on the PATH" in pod.termination.message
