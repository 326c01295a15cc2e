"""Faults that another tenant, a pod or an object of another release causes by what the operator reads."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from finetune_operator import names
from testing.builders.mutations import mutate_text
from testing.faults.catalog.fault import InjectedFault, make_program_fields
from testing.faults.catalog.rank_faults import build_injection_environment
from testing.faults.catalog.release_faults import restart_operator, stop_operator
from testing.faults.expectation import OPERATOR_RESTARTS
from testing.faults.foreign_objects import DEEP_LEVELS, build_decoy_pod, build_forged_config_map
from testing.faults.job_under_test import JobUnderTest, RawBody, count_restarts
from testing.faults.kwok_job import RANK_KILLED, build_termination, run_kwok_job
from testing.processes.operator_stack import FORGER, build_example_job, get_reported_step, has_condition

DECOY_SECONDS = 25  # more than two intervals of the progress poller
PATTERN_MESSAGE = json.dumps({"final": True, "outcome": "failed", "errorType": "cu" * 2000})
NUMBERS_MESSAGE = '{"final":true,"outcome":"failed","time":1e308,"progress":{"step":7,"loss":"nan"}}'


@contextmanager
def create_deep_job(job: JobUnderTest) -> Iterator[None]:
    """Create a suspended job with a deep field, restart the replicas and kill PID 1 of node 1."""
    name = f"{job.name}-deep"
    body = build_example_job(name, suspend=True, deepspeed={"config": {"nested": "NESTED"}})
    nested = '{"a":' * DEEP_LEVELS + "1" + "}" * DEEP_LEVELS
    job.installation.kubectl("create", "-f", "-", stdin=json.dumps(body).replace('"NESTED"', nested))
    try:
        path = f"/apis/{names.API_VERSION}/namespaces/{job.installation.namespace}/{names.FINETUNEJOB[2]}/{name}"
        job.values["levels in the stored object"] = job.installation.kubectl("get", "--raw", path).count('{"a":')
        job.installation.kubectl("wait", "--for=condition=Suspended", f"ftj/{name}", "--timeout=60s")
        restarts = sum(map(count_restarts, job.list_operator_pods()))
        restart_operator(job)
        job.values[OPERATOR_RESTARTS] = restarts + sum(map(count_restarts, job.list_operator_pods()))
        job.kill_container(1)
        yield
    finally:
        job.installation.delete(name)


def find_termination_file(job: JobUnderTest, node_rank: int) -> Path:
    """Return the file on the host that the kubelet reads as termination message."""
    pod = job.chaos.get_pod(job.installation.namespace, job.get_pod_name(node_rank))
    pods = job.chaos.find_node(pod["spec"]["nodeName"]).root / "kubelet" / "pods"
    folder: Path = pods / pod["metadata"]["uid"] / "containers" / names.CONTAINER
    return next(folder.iterdir())


@contextmanager
def replace_message(job: JobUnderTest, message: str) -> Iterator[None]:
    """Write a termination message, as the program of a tenant can, and kill PID 1 of node 1."""
    leader = job.find_leader()["metadata"]["name"]
    find_termination_file(job, 1).write_text(message)
    job.kill_container(1)
    job.wait_until(
        lambda recorder: any(attempt["state"] == "Failed" for attempt in recorder.attempts),
        goal="judged",
        timeout_seconds=60,
    )
    job.values["changes of the leader"] = int(job.find_leader()["metadata"]["name"] != leader)
    yield


@contextmanager
def send_numbers_message(job: JobUnderTest) -> Iterator[None]:
    """Send impossible numbers, and suspend and resume the job in its next attempt."""
    with replace_message(job, NUMBERS_MESSAGE):
        job.wait_until(
            lambda recorder: bool(recorder.steps) and recorder.steps[-1].attempt == 1,
            goal="training again",
            timeout_seconds=60,
        )
        suspend_and_resume(job)
        yield


@contextmanager
def suspend(job: JobUnderTest) -> Iterator[None]:
    time.sleep(12)  # the progress poller has read /status
    pod = f"/api/v1/namespaces/{job.installation.namespace}/pods/{job.get_pod_name(0)}:{names.STATUS_PORT}"
    status = json.loads(job.installation.kubectl("get", "--raw", f"{pod}/proxy/status"))
    job.values["loss in /status"] = status["progress"]["loss"]
    suspend_and_resume(job)
    yield


def suspend_and_resume(job: JobUnderTest) -> None:
    """Measure how long it takes until the job is suspended."""
    started_at = time.monotonic()
    job.patch({"spec": {"suspend": True}})
    job.wait_until(
        lambda recorder: has_condition({"status": recorder.status}, "Suspended"),
        goal="suspended",
        timeout_seconds=90,
    )
    job.values["suspended after, s"] = round(time.monotonic() - started_at, 1)
    job.patch({"spec": {"suspend": False}})


@contextmanager
def end_nodes_with_random_messages(job: JobUnderTest) -> Iterator[None]:
    source = random.Random(job.name)
    with run_kwok_job(job, num_nodes=64, restartPolicy={"maxRestarts": 0}) as other:
        other.wait_until_running(attempt=0, timeout_seconds=60)

        def build(node_rank: int) -> RawBody:
            terminated = build_termination(exit_code=1, **RANK_KILLED, rank=node_rank, progress={"step": 5, "loss": 1})
            message = mutate_text(terminated["message"], source, count=1 + node_rank % 4)
            return {**terminated, "message": message.encode(errors="replace").decode()[:4096]}

        with stop_operator(job):  # otherwise it deletes the other pods after the first failure
            other.end_nodes(build)
        job.values["verdict on the other job after, s"] = other.wait_until(
            lambda status: any(attempt["state"] == "Failed" for attempt in status.get("attempts", ())),
            goal="judged",
            timeout_seconds=120,
        )
        job.values["attempt of the other job"] = other.read_status()["attempts"][0]["state"]
    yield


@contextmanager
def forge_config_map(job: JobUnderTest) -> Iterator[None]:
    name = job.get_config_map_name(attempt=1)
    genuine = job.get_config_map(job.get_config_map_name(attempt=0))
    theirs = json.dumps({"command": {"exec": ["sh", "-c", "exit 7"]}})
    job.installation.apply(build_forged_config_map(genuine, name, **{names.CONFIG_KEY: theirs}), user=FORGER)
    job.kill_container(1)
    yield
    is_genuine = job.get_config_map(name)["data"] == genuine["data"]
    job.values["content of the ConfigMap"] = "the operator's" if is_genuine else "forged"


@contextmanager
def create_decoy_pod(job: JobUnderTest) -> Iterator[None]:
    decoy = build_decoy_pod(job.installation.get_job(job.name))
    pod = decoy["metadata"]["name"]
    job.installation.apply(decoy, user=FORGER)
    try:
        job.installation.kubectl("wait", "--for=condition=Ready", f"pod/{pod}", "--timeout=60s")
        time.sleep(DECOY_SECONDS)
        job.kill_container(1)
        yield
        statuses = [change.status for change in job.recorder.status_changes]
        reported = [get_reported_step({"status": status}) for status in statuses]
        recorded = [attempt.get("lastStep") or 0 for status in statuses for attempt in status.get("attempts", ())]
        job.values["largest step in the status"] = max(*reported, *recorded, 0)
    finally:
        job.installation.kubectl("delete", "pod", pod, "--ignore-not-found", "--wait=false")


UNTRUSTED_FAULTS = {
    "deep-object": InjectedFault(create_deep_job),
    "message-pattern": InjectedFault(partial(replace_message, message=PATTERN_MESSAGE), is_isolated=True),
    "message-numbers": InjectedFault(send_numbers_message, is_isolated=True),
    "status-numbers": InjectedFault(
        suspend, make_program_fields(env=build_injection_environment(INJECT_STATUS="1")), is_isolated=True
    ),
    "messages-fuzzed": InjectedFault(end_nodes_with_random_messages),
    "forged-config-map": InjectedFault(forge_config_map, is_isolated=True),
    "decoy-pod": InjectedFault(create_decoy_pod, is_isolated=True),
}
