"""The end of training when it is not smooth: an upload that takes long, ranks that crash or hang on their way out."""

import os
from pathlib import Path
from typing import Any

import pytest

from finetune_api.termination import Outcome
from testing.fakes.hub import TOKEN, serve_hub
from testing.models import tiny_text as tiny
from testing.processes.supervisors import REPOSITORY, Job, stop

pytestmark = pytest.mark.slow

AT_THE_END = """
import atexit, os, signal, sys
if "ranks" in sys.orig_argv:
    atexit.register({what})
"""

DOWN = """
import atexit, sys
class Last:
    def __del__(self, write=__import__("os").write):
        write(1, b"taken down")
if "ranks" in sys.orig_argv:
    atexit.register(print, "registered for the end")
    sys.kept_to_the_last = Last()
"""


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tiny.Tiny:
    return tiny.build(tmp_path_factory.mktemp("tiny"), rows=30, eval_rows=1)


def spec(files: tiny.Tiny, **fields: Any) -> dict[str, Any]:
    return {
        "model": {"name": str(files.model)},
        "dataset": {"train": [{"name": str(files.train)}], "numWorkers": 0},
        "sft": {},
        "lora": {"r": 4},
        "training": {"globalBatchSize": 4, "maxSteps": 2, "ddpTimeout": 10},
        "numNodes": 2,
        "nprocPerNode": 1,
        "output": {"persistentVolumeClaim": {"claimName": "unused"}},
        **fields,
    }


def first(source: str, folder: Path) -> dict[str, str]:
    """The environment of processes that run it before anything else."""
    (folder / "sitecustomize.py").write_text(source)
    return {"PYTHONPATH": os.pathsep.join(map(str, (folder, REPOSITORY / "operator", REPOSITORY / "trainer")))}


def test_a_result_may_take_longer_to_the_hub_than_a_collective_may_take(files: tiny.Tiny, tmp_path: Path) -> None:
    with serve_hub() as hub:
        hub.slow = 7.0  # twice
        output = {"persistentVolumeClaim": {"claimName": "unused"}, "pushToHub": {"repo": "me/model"}}
        env = {"HF_ENDPOINT": hub.address, "HF_TOKEN": TOKEN}
        pods = Job(tmp_path, spec(files, output=output), nodes=2, ranks_per_node=1, env=env).run()

    assert [pod.process.returncode for pod in pods] == [0, 0], pods[0].log + pods[1].log
    assert "adapter_model.safetensors" in hub.repositories["me/model"]


def test_ranks_do_not_take_their_interpreter_down(files: tiny.Tiny, tmp_path: Path) -> None:
    """Whose threads may stop there for ever; what was registered for the end of the process is done before."""

    (pod,) = Job(tmp_path, spec(files, numNodes=1), ranks_per_node=1, env=first(DOWN, tmp_path)).run()

    assert pod.process.returncode == 0, pod.log
    assert "registered for the end" in pod.log
    assert "taken down" not in pod.log


@pytest.mark.parametrize(
    ("what", "told"),
    [
        ("os.abort", "launcher: local rank 0 ended with -6"),
        ("signal.pause", "supervisor: the ranks hang"),
    ],
)
def test_what_happens_to_ranks_after_the_result_is_published_does_not_matter(
    files: tiny.Tiny, tmp_path: Path, what: str, told: str
) -> None:
    env = {**first(AT_THE_END.format(what=what), tmp_path), "FINETUNE_HANG_SECONDS": "5"}

    pods = Job(tmp_path, spec(files), nodes=2, ranks_per_node=1, env=env).run()

    for pod in pods:
        assert told in pod.log
        assert pod.process.returncode == 0, pod.log
        assert pod.termination is not None
        assert pod.termination.outcome is Outcome.SUCCEEDED


def test_ranks_that_crash_after_they_saved_as_asked_have_stopped(files: tiny.Tiny, tmp_path: Path) -> None:
    training = {"globalBatchSize": 4, "maxSteps": 100_000}
    asked = spec(files, numNodes=1, training=training)
    (pod,) = Job(tmp_path, asked, ranks_per_node=1, env=first(AT_THE_END.format(what="os.abort"), tmp_path)).start()
    pod.wait_for_step(1)
    stop(pod)

    assert pod.wait() == 143, pod.log
    assert "launcher: local rank 0 ended with -6" in pod.log
    assert pod.termination is not None
    assert pod.termination.outcome is Outcome.STOPPED
    assert pod.termination.message == "stopped as asked; a checkpoint was saved"
