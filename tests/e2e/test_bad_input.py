"""Bad input that only the operator or the trainer can know: told once, in words, and never a restart loop."""

import shutil
from collections.abc import Callable
from typing import Any

import pytest

from testing.processes.cluster_training import training
from testing.processes.operator_stack import Raw, Stack, condition

pytestmark = pytest.mark.cluster
Start = Callable[..., str]


def failed_message(job: Raw) -> str:
    failed = next(c for c in job["status"]["conditions"] if c["type"] == "Failed")
    return f"{failed['reason']}: {failed['message']}"


def train_on(name: str) -> Raw:
    return {"train": [{"name": name}]}


WRONG: dict[str, tuple[Raw, str, tuple[str, ...]]] = {
    "missing dataset": ({"dataset": train_on("/data/none.jsonl")}, "DatasetError", ("/data/none.jsonl",)),
    "malformed row": ({"dataset": train_on("/data/bad.jsonl")}, "DatasetError", ("bad.jsonl", "2")),
    "missing model": ({"model": {"name": "/data/none"}}, "ModelNotFound", ("/data/none",)),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_users_error_fails_the_job_at_once(stack: Stack, start: Start, case: str) -> None:
    fields, reason, words = WRONG[case]
    good = (stack.folder("datasets") / "train.jsonl").read_text().splitlines()
    (stack.folder("datasets") / "bad.jsonl").write_text(f'{good[0]}\n{{"messages": "no list"}}\n')

    finished = stack.wait_finished(start(numNodes=1, training=training(max_steps=4), **fields))

    message = failed_message(finished)
    assert message.startswith(f"{reason}: "), message
    assert all(word in message for word in words), message
    assert finished["status"].get("restarts", 0) == 0
    assert finished["status"]["attempts"][-1]["fault"] == "user"


def test_a_claim_for_one_node_is_refused_for_two(stack: Stack, start: Start) -> None:
    claim: Raw = {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": "one-node"},
        "spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}},
    }
    stack.apply(claim)
    finished = stack.wait_finished(start(output={"persistentVolumeClaim": {"claimName": "one-node"}}))
    assert "one-node is ReadWriteOnce, but 2 nodes mount it: it must be ReadWriteMany" in failed_message(finished)
    assert stack.pods(finished["metadata"]["name"]) == []


def test_another_jobs_output_is_not_touched(stack: Stack, start: Start, name: str) -> None:
    folder = stack.output(name)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "job.json").write_text('{"uid": "somebody-else", "namespace": "x", "name": "theirs"}')
    for path in (folder, folder.parent):
        path.chmod(0o777)
    try:
        finished = stack.wait_finished(start(numNodes=1, training=training(max_steps=4)))
        message = failed_message(finished)
        assert message.startswith("OutputError: ")
        assert "output.overwrite" in message
        assert (folder / "job.json").read_text().startswith('{"uid": "somebody-else"')
    finally:
        shutil.rmtree(folder, ignore_errors=True)


WAITS: dict[str, tuple[Raw, str, str]] = {
    "an image that does not exist": ({"image": "registry.invalid/nobody/nothing:v0"}, "ImagePullFailed", "spec.image"),
    "more cores than any node has": ({"resources": {"requests": {"cpu": "400"}}}, "Unschedulable", "Insufficient cpu"),
}


@pytest.mark.parametrize("case", WAITS)
def test_what_may_still_come_is_waited_for_and_named(stack: Stack, start: Start, case: str) -> None:
    fields, reason, words = WAITS[case]
    fields = {**fields, "imagePullPolicy": "IfNotPresent"} if "image" in fields else fields

    def told(job: Raw) -> Any:
        waiting = job.get("status", {}).get("waiting") or {}
        return waiting.get("reason") == reason and words in waiting["message"]

    job = stack.wait(start(**fields), told, what=f"waiting for {reason}", timeout_seconds=60)
    running = next(c for c in job["status"]["conditions"] if c["type"] == "Running")
    assert (running["status"], running["reason"]) == ("False", reason)
    assert not condition(job, "Finished")
    assert len(job["status"]["attempts"]) == 1
