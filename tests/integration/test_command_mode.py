"""Command mode with real processes: scripts that know nothing of us, in local mode and through the one file."""

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from finetune_api.termination import Outcome
from finetune_api.v1alpha1.status import AttemptState
from testing.models import tiny_text as tiny
from testing.processes.local_mode import (
    PATIENCE_SECONDS,
    LocalJob,
    finish,
    wait_until,
    wait_until_nothing_runs,
    write_command,
)
from testing.processes.supervisor_file import write_supervisor
from testing.processes.supervisors import Job, Pod, stop

pytestmark = pytest.mark.slow

SCRIPTS = Path(__file__).parents[2] / "testing" / "processes" / "scripts"


def ddp(*args: str, out: str = "$(FINETUNE_OUTPUT)") -> dict[str, Any]:
    return {"script": "plain_ddp.py", "args": ["--save_dir", out, *args], "workingDir": str(SCRIPTS)}


def pids_of(job: LocalJob) -> list[int]:
    """Ranks of the job: processes with its folder in the environment and the name that the launcher gives them."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            name = (entry / "comm").read_text()
            ours = str(job.folder).encode() in (entry / "environ").read_bytes()
        except OSError:
            continue
        if ours and name.startswith("rank-"):
            found.append(int(entry.name))
    return sorted(found)


def test_an_exception_of_one_rank_ends_the_job_with_its_type_its_message_and_its_rank(tmp_path: Path) -> None:
    job = write_command(tmp_path, ddp("--raise_on_rank", "3", out=str(tmp_path)), output=None)

    code, said = job.run()

    assert code == 1, said
    (record,) = job.status.attempts
    assert (record.reason, record.node_rank, record.rank) == ("UserCodeError", 1, 3), said
    assert "ValueError: row 1 of rank 3 has no label" in record.message
    assert not (tmp_path / "output/default/first").exists()
    assert "the logs are in output/default/first.local/attempt-0" in said


def test_a_killed_rank_restarts_every_node_and_the_script_goes_on_from_its_own_checkpoint(tmp_path: Path) -> None:
    job = write_command(tmp_path, ddp("--epochs", "4", "--seconds_per_step", "0.4"))
    process = job.start("--logs")

    wait_until(lambda: 1 if (job.output / "model.pt").is_file() else None, "the first checkpoint")
    os.kill(pids_of(job)[-1], signal.SIGKILL)
    code, said = finish(process)

    assert code == 0, said
    killed, last = job.status.attempts
    assert (killed.reason, job.status.restarts) == ("RankKilled", 1), said
    assert last.state is AttemptState.SUCCEEDED
    assert said.count("epoch 0 loss") == 1, said
    assert said.count("epoch 3 loss") == 1
    wait_until_nothing_runs(tmp_path)


def test_a_trainer_of_transformers_shows_its_progress(tmp_path: Path) -> None:
    files = tiny.build(tmp_path / "tiny", rows=8, eval_rows=2)
    asked = {"script": "plain_trainer.py", "args": ["/data/model", "$(FINETUNE_OUTPUT)", "60"]}
    job = write_command(tmp_path, {**asked, "workingDir": str(SCRIPTS)}, data=files.train.parent, nprocPerNode=1)
    process = job.start()

    def middle() -> int | None:
        shown = job.status.display if (job.beside / "status.json").is_file() else None
        known = shown and shown.progress and shown.loss and shown.eta
        return int(shown.progress.partition("%")[0]) if shown and known else None

    percent = wait_until(middle, "progress with loss and ETA")
    code, said = finish(process)

    assert code == 0, said
    assert 0 < percent < 100
    assert "Complete: 60 steps, loss " in said
    assert job.status.progress is not None
    assert (job.status.progress.step, job.status.progress.total_steps) == (60, 60)
    assert job.status.progress.learning_rate is not None


def test_a_program_that_reports_progress_and_then_none_is_started_again(tmp_path: Path) -> None:
    files = tiny.build(tmp_path / "tiny", rows=8, eval_rows=2)
    asked = {"script": "plain_trainer.py", "args": ["/data/model", "$(FINETUNE_OUTPUT)", "40"]}
    policy = {"restartPolicy": {"hangTimeoutSeconds": 10}}
    job = write_command(
        tmp_path, {**asked, "workingDir": str(SCRIPTS)}, data=files.train.parent, nprocPerNode=1, **policy
    )
    process = job.start()

    def step() -> int | None:
        known = job.status.progress if (job.beside / "status.json").is_file() else None
        return known.step if known and known.step > 2 else None

    wait_until(step, "progress")
    os.kill(pids_of(job)[-1], signal.SIGSTOP)
    code, said = finish(process)

    assert code == 0, said
    hung, last = job.status.attempts
    assert (hung.reason, hung.node_rank, last.state) == ("Hang", 0, AttemptState.SUCCEEDED), said
    assert "no sign of life for" in hung.message
    wait_until_nothing_runs(tmp_path)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_supervisor(tmp_path_factory.mktemp("image"))


def foreign(folder: Path, bundle: Path, asked: dict[str, Any], **more: Any) -> Pod:
    """A pod whose image has torch, and nothing of ours but the one file."""
    program = (sys.executable, str(bundle))
    (pod,) = Job(folder, {"command": asked}, program=program, env={"PYTHONPATH": ""}, **more).start()
    return pod


@pytest.mark.parametrize("asked", ["script", "exec"])
def test_the_one_file_tells_a_ranks_exception_to_the_operator(tmp_path: Path, bundle: Path, asked: str) -> None:
    words = ["--save_dir", str(tmp_path), "--raise_on_rank", "1"]
    script = {"script": str(SCRIPTS / "plain_ddp.py"), "args": words}
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", str(SCRIPTS / "plain_ddp.py")]

    pod = foreign(tmp_path / "job", bundle, script if asked == "script" else {"exec": [*torchrun, *words]})

    assert pod.wait() == 1, pod.log
    said = pod.termination
    assert said is not None
    assert (said.outcome, said.error_type, said.rank, said.local_rank) == (Outcome.FAILED, "ValueError", 1, 1), pod.log
    assert (said.message, said.exit_code) == ("row 1 of rank 1 has no label", 1)
    assert "plain_ddp.py" in said.stack


SAVES_AT_SIGTERM = """
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


@pytest.mark.parametrize("asked", ["script", "exec"])
def test_sigterm_reaches_the_script_which_has_time_to_save(tmp_path: Path, bundle: Path, asked: str) -> None:
    """Also behind a launcher that dies of the signal itself, without passing it on."""
    script, saved = tmp_path / "saves.py", tmp_path / "saved"
    script.write_text(SAVES_AT_SIGTERM)
    launcher = ["/bin/sh", "-c", f"{sys.executable} {script} {saved}; true"]
    command = {"script": str(script), "args": [str(saved)]} if asked == "script" else {"exec": launcher}
    pod = foreign(tmp_path / "job", bundle, command, ranks_per_node=1)
    wait_until(lambda: 1 if "ready" in pod.log else None, "the script")

    stop(pod)

    assert pod.wait() == 143, pod.log
    assert saved.exists()
    assert pod.termination is not None
    assert (pod.termination.outcome, pod.termination.message) == (Outcome.STOPPED, "stopped as asked")


def test_what_ignores_sigterm_is_killed_when_the_grace_is_over(tmp_path: Path, bundle: Path) -> None:
    asked = {"exec": ["/bin/sh", "-c", "trap '' TERM; echo ready; while :; do sleep 0.2; done"]}
    pod = foreign(tmp_path / "job", bundle, asked, grace_seconds=4)
    wait_until(lambda: 1 if "ready" in pod.log else None, "the program")

    began = time.monotonic()
    stop(pod)

    assert pod.wait() == 143, pod.log
    assert time.monotonic() - began < PATIENCE_SECONDS / 10
    assert pod.termination is not None
    assert "grace period of 4s" in pod.termination.message


def test_a_program_that_ends_badly_is_told_by_its_code_and_its_last_line(tmp_path: Path, bundle: Path) -> None:
    pod = foreign(tmp_path / "job", bundle, {"exec": ["/bin/sh", "-c", "echo no GPU here >&2; exit 3"]})

    assert pod.wait() == 1
    said = pod.termination
    assert said is not None
    assert (said.error_type, said.exit_code) == ("RankExited", 3)
    assert said.message == "exited with code 3; its last line: no GPU here"


def test_a_script_that_is_not_there_is_the_users_to_mend(tmp_path: Path, bundle: Path) -> None:
    pod = foreign(tmp_path / "job", bundle, {"script": "train.py", "workingDir": "/nowhere"})

    assert pod.wait() == 2
    assert pod.termination is not None
    assert pod.termination.error_type == "InvalidSpec"
    assert "spec.command.workingDir: /nowhere" in pod.termination.message


def test_an_image_with_neither_torch_nor_torchrun_is_named(tmp_path: Path, bundle: Path) -> None:
    """Isolated from this environment's packages, as a base image's python3 is."""
    (tmp_path / "train.py").touch()
    program = (str(Path(sys.executable).resolve()), "-S", str(bundle))
    asked = {"command": {"script": str(tmp_path / "train.py")}}

    (pod,) = Job(tmp_path / "job", asked, program=program, env={"PYTHONPATH": "", "PATH": "/bin"}).run()

    assert pod.process.returncode == 2, pod.log
    assert pod.termination is not None
    assert "has no torch, and there is no torchrun on the PATH" in pod.termination.message
