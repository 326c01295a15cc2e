"""Jobs in every state, created before the operator is switched and checked afterwards."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from testing.processes.cluster_training import build_training_fields, wait_for_checkpoint
from testing.processes.operator_stack import OperatorInstallation, RawBody, build_example_job, has_condition

IGNORE_SIGTERM = "trap '' TERM; for i in $(seq 40); do sleep 1; done"
COMMAND_FIELDS: RawBody = {
    **dict.fromkeys(("model", "dataset", "sft", "lora", "training", "output", "volumes")),
    "numNodes": 1,
    "nprocPerNode": 1,
}


@dataclass(frozen=True)
class StateCase:
    """One state: how a job gets into it, and what has to hold after the switch.

    `check` gets the job and its pods before the switch, and raises AssertionError or TimeoutError.
    """

    name: str
    fields: dict[str, Any]
    is_reached: Callable[[RawBody], bool]
    check: Callable[[Switch, str, Before], None]
    prepare: Callable[[Switch, str], None] = lambda switch, job: None


@dataclass(frozen=True)
class Before:
    """State of a job before the switch."""

    job: RawBody
    pods: frozenset[str]  # uids

    @property
    def attempt(self) -> int | None:
        attempt: int | None = self.job.get("status", {}).get("attempt")
        return attempt


@dataclass(frozen=True)
class Switch:
    """A switch to another release, on a cluster with the images of both. old_image: with which the jobs began."""

    installation: OperatorInstallation
    old_image: str

    def patch(self, job: str, patch: str) -> None:
        self.installation.kubectl("patch", "ftj", job, "--type=merge", "-p", patch)

    def read(self, job: str) -> Before:
        pods = frozenset(pod["metadata"]["uid"] for pod in self.installation.list_pods(job))
        return Before(self.installation.get_job(job), pods)


def get_last_attempt(job: RawBody) -> RawBody:
    attempts: list[RawBody] = job.get("status", {}).get("attempts") or [{}]
    return attempts[-1]


def has_state(state: str) -> Callable[[RawBody], bool]:
    return lambda job: get_last_attempt(job).get("state") == state


def _check_unchanged(switch: Switch, job: str, before: Before) -> None:
    """Require the same attempt, the same pods and no failure."""
    after = switch.read(job)
    assert after.pods == before.pods, f"pods {before.pods} became {after.pods}"
    assert after.attempt == before.attempt, f"attempt {before.attempt} became {after.attempt}"
    assert not has_condition(after.job, "Failed"), after.job["status"]["conditions"]


def _check_finished(switch: Switch, job: str, before: Before) -> None:
    _check_unchanged(switch, job, before)
    completion_time = switch.installation.get_job(job)["status"]["completionTime"]
    assert completion_time == before.job["status"]["completionTime"]


def _check_failed(switch: Switch, job: str, before: Before) -> None:
    after = switch.read(job)
    assert after.pods == before.pods
    assert after.job["status"]["completionTime"] == before.job["status"]["completionTime"]


def _check_running(switch: Switch, job: str, before: Before) -> None:
    """Require that training goes on, and that a suspended and resumed job continues with the image it began with."""
    _check_unchanged(switch, job, before)
    step = get_last_attempt(before.job).get("lastStep") or 0
    wait_for_checkpoint(switch.installation, job, after=step)
    switch.patch(job, '{"spec":{"suspend":true}}')
    suspended = switch.installation.wait_until(job, lambda j: has_condition(j, "Suspended"), description="Suspended")
    _check_resumes(switch, job, Before(suspended, frozenset()))


def _check_resumes(switch: Switch, job: str, before: Before) -> None:
    """Resume the job; require that it continues from its checkpoint with the image with which it began."""
    stopped_at = get_last_attempt(before.job)["lastStep"]
    switch.patch(job, '{"spec":{"suspend":false}}')
    resumed = switch.installation.wait_until(
        job,
        lambda j: has_condition(j, "Running") and get_last_attempt(j).get("firstStep") is not None,
        description="resumed",
    )
    wait_for_checkpoint(switch.installation, job, after=stopped_at)
    record = get_last_attempt(resumed)
    assert record["firstStep"] == stopped_at, f"resumed from {record['firstStep']}, not {stopped_at}"
    assert resumed["status"].get("restarts", 0) == 0
    images = {
        pod["spec"]["containers"][0]["image"]
        for pod in switch.installation.list_pods(job)
        if pod["metadata"]["labels"]["finetune.dev/attempt"] == str(record["attempt"])
    }
    assert images == {switch.old_image}, f"the attempt runs {images} instead of {switch.old_image}"


def _check_stopping(switch: Switch, job: str, before: Before) -> None:
    after = switch.installation.wait_until(job, lambda j: has_condition(j, "Suspended"), description="Suspended")
    assert get_last_attempt(after)["attempt"] == before.attempt


def _is_untouched(job: RawBody) -> bool:
    """Return whether no operator has written the status; the CRD defines a default for it."""
    return "phase" not in job.get("status", {})


def _check_queued(switch: Switch, job: str, before: Before) -> None:
    assert _is_untouched(before.job)
    assert has_condition(switch.installation.wait_until_finished(job), "Complete")


def _suspend_after_checkpoint(switch: Switch, job: str) -> None:
    wait_for_checkpoint(switch.installation, job)
    switch.patch(job, '{"spec":{"suspend":true}}')


def _suspend_running_job(switch: Switch, job: str) -> None:
    switch.installation.wait_until(job, lambda j: has_condition(j, "Running"), description="Running")
    switch.patch(job, '{"spec":{"suspend":true}}')


def _runs_attempt(number: int) -> Callable[[RawBody], bool]:
    return lambda job: job.get("status", {}).get("attempt") == number and has_condition(job, "Running")


def _delete_pods_twice(switch: Switch, job: str) -> None:
    """Delete the pod of two attempts; the first restart is immediate, the second one is delayed."""
    for attempt in (0, 1):
        pod = f"{job}-{attempt}-0"
        switch.installation.wait_until(job, _runs_attempt(attempt), description=f"running attempt {attempt}")
        switch.installation.kubectl("delete", "pod", pod, "--grace-period=1")


def _run(program: str) -> RawBody:
    return {**COMMAND_FIELDS, "command": {"exec": ["sh", "-c", program]}}


TRAINING: RawBody = {"training": build_training_fields(max_steps=100_000, save_steps=20)}
STATES = (
    StateCase(
        "Running",
        TRAINING,
        is_reached=lambda job: has_condition(job, "Running") and (get_last_attempt(job).get("lastStep") or 0) > 20,
        check=_check_running,
    ),
    StateCase(
        "Suspended",
        TRAINING,
        is_reached=lambda job: has_condition(job, "Suspended"),
        check=_check_resumes,
        prepare=_suspend_after_checkpoint,
    ),
    StateCase(
        "Starting",
        {**_run("true"), "podTemplate": {"nodeSelector": {"absent": "true"}}},
        is_reached=lambda job: (job["status"].get("waiting") or {}).get("reason") == "Unschedulable",
        check=_check_unchanged,
    ),
    StateCase(
        "Restarting",
        {**_run("sleep 1000"), "restartPolicy": {"backoffSeconds": 3600, "maxBackoffSeconds": 3600}},
        is_reached=lambda job: has_state("Starting")(job) and "notBefore" in get_last_attempt(job),
        check=_check_unchanged,
        prepare=_delete_pods_twice,
    ),
    StateCase(
        "Stopping",
        _run(IGNORE_SIGTERM),
        is_reached=has_state("Stopping"),
        check=_check_stopping,
        prepare=_suspend_running_job,
    ),
    StateCase("Complete", _run("true"), is_reached=lambda job: has_condition(job, "Complete"), check=_check_finished),
    StateCase(
        "Failed",
        {**_run("exit 3"), "restartPolicy": {"maxRestarts": 0}},
        is_reached=lambda job: has_condition(job, "Failed"),
        check=_check_failed,
    ),
    StateCase("Queued", _run("true"), is_reached=_is_untouched, check=_check_queued),
)


def build_job(case: StateCase, name: str, *, image: str, extra_fields: RawBody) -> RawBody:
    """Return the job of a state; commands need an image, trainer jobs use the trainer image of the release."""
    fields = {**case.fields, **({"image": image} if "command" in case.fields else {}), **extra_fields}
    return build_example_job(name, resources={"requests": {"cpu": "50m", "memory": "128Mi"}}, **fields)


def wait_for_state(switch: Switch, case: StateCase, job: str) -> Before:
    """Bring the job into the state and return it."""
    case.prepare(switch, job)
    switch.installation.wait_until(job, case.is_reached, description=case.name, timeout_seconds=180)
    time.sleep(1)  # the status of pods and job settles
    return switch.read(job)
