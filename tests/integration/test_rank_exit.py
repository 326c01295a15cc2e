"""Tests of a slow upload after training, and of ranks that crash or hang on exit."""

import os
from pathlib import Path
from typing import Any

import pytest

from finetune_api.termination import Outcome
from testing.fakes.hub import TOKEN, serve_hub
from testing.models import tiny_text
from testing.processes.supervisors import REPOSITORY, SupervisorJob, stop

pytestmark = pytest.mark.slow

CALL_AT_EXIT = """
import atexit, os, signal, sys
if "ranks" in sys.orig_argv:
    atexit.register({call})
"""

REPORT_TEARDOWN = """
import atexit, sys
class TeardownReporter:
    def __del__(self, write=__import__("os").write):
        write(1, b"interpreter teardown")
if "ranks" in sys.orig_argv:
    atexit.register(print, "atexit handler ran")
    sys.teardown_reporter = TeardownReporter()
"""


@pytest.fixture(scope="module")
def tiny_files(tmp_path_factory: pytest.TempPathFactory) -> tiny_text.TinyFiles:
    return tiny_text.build(tmp_path_factory.mktemp("tiny"), rows=30, eval_rows=1)


def build_spec(tiny_files: tiny_text.TinyFiles, **fields: Any) -> dict[str, Any]:
    return {
        "model": {"name": str(tiny_files.model)},
        "dataset": {"train": [{"name": str(tiny_files.train)}], "numWorkers": 0},
        "sft": {},
        "lora": {"r": 4},
        "training": {"globalBatchSize": 4, "maxSteps": 2, "ddpTimeout": 10},
        "numNodes": 2,
        "nprocPerNode": 1,
        "output": {"persistentVolumeClaim": {"claimName": "unused"}},
        **fields,
    }


def build_preloading_environment(source: str, folder: Path) -> dict[str, str]:
    """Return environment variables that make every Python process run this source at startup."""
    (folder / "sitecustomize.py").write_text(source)
    return {"PYTHONPATH": os.pathsep.join(map(str, (folder, REPOSITORY / "operator", REPOSITORY / "trainer")))}


def test_upload_may_exceed_the_collective_timeout(tiny_files: tiny_text.TinyFiles, tmp_path: Path) -> None:
    with serve_hub() as hub:
        hub.delay_seconds = 7.0  # delay of each of the two requests to the Hub
        output = {"persistentVolumeClaim": {"claimName": "unused"}, "pushToHub": {"repo": "me/model"}}
        env = {"HF_ENDPOINT": hub.address, "HF_TOKEN": TOKEN}
        pods = SupervisorJob(tmp_path, build_spec(tiny_files, output=output), nodes=2, ranks_per_node=1, env=env).run()

    assert [pod.process.returncode for pod in pods] == [0, 0], pods[0].log + pods[1].log
    assert "adapter_model.safetensors" in hub.repositories["me/model"]


def test_ranks_run_atexit_handlers_but_skip_interpreter_teardown(
    tiny_files: tiny_text.TinyFiles, tmp_path: Path
) -> None:
    """Threads may deadlock during interpreter teardown."""
    (pod,) = SupervisorJob(
        tmp_path,
        build_spec(tiny_files, numNodes=1),
        ranks_per_node=1,
        env=build_preloading_environment(REPORT_TEARDOWN, tmp_path),
    ).run()

    assert pod.process.returncode == 0, pod.log
    assert "atexit handler ran" in pod.log
    assert "interpreter teardown" not in pod.log


@pytest.mark.parametrize(
    ("exit_call", "log_line"),
    [
        pytest.param("os.abort", "launcher: local rank 0 ended with -6", id="crash"),
        pytest.param("signal.pause", "supervisor: the ranks hang", id="hang"),
    ],
)
def test_crash_or_hang_after_publishing_does_not_fail_the_job(
    tiny_files: tiny_text.TinyFiles, tmp_path: Path, exit_call: str, log_line: str
) -> None:
    env = {**build_preloading_environment(CALL_AT_EXIT.format(call=exit_call), tmp_path), "FINETUNE_HANG_SECONDS": "5"}

    pods = SupervisorJob(tmp_path, build_spec(tiny_files), nodes=2, ranks_per_node=1, env=env).run()

    for pod in pods:
        assert log_line in pod.log
        assert pod.process.returncode == 0, pod.log
        assert pod.termination is not None
        assert pod.termination.outcome is Outcome.SUCCEEDED


def test_ranks_that_crash_after_the_requested_checkpoint_count_as_stopped(
    tiny_files: tiny_text.TinyFiles, tmp_path: Path
) -> None:
    training = {"globalBatchSize": 4, "maxSteps": 100_000}
    job_spec = build_spec(tiny_files, numNodes=1, training=training)
    (pod,) = SupervisorJob(
        tmp_path,
        job_spec,
        ranks_per_node=1,
        env=build_preloading_environment(CALL_AT_EXIT.format(call="os.abort"), tmp_path),
    ).start()
    pod.wait_for_step(1)
    stop(pod)

    assert pod.wait() == 143, pod.log
    assert "launcher: local rank 0 ended with -6" in pod.log
    assert pod.termination is not None
    assert pod.termination.outcome is Outcome.STOPPED
    assert pod.termination.message == "stopped on request; a checkpoint was saved"
