"""Faults of load: large jobs, many finished jobs, slow webhooks, on simulated Kubernetes nodes where possible."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from finetune_operator import names
from testing.faults.catalog.fault import InjectedFault, Injection
from testing.faults.catalog.policy_faults import register_webhook
from testing.faults.catalog.release_faults import restart_operator, stop_operator
from testing.faults.job_under_test import JobUnderTest
from testing.faults.kwok_job import (
    RANK_KILLED,
    SUCCEEDED,
    build_command_job,
    build_termination,
    create_namespace,
    run_kwok_job,
)
from testing.processes.waiting import wait_until

FINISHED_JOBS = 1_000
SLOW_NODES = 128
WEBHOOK_SECONDS = 8.0
MESSAGE = "集群中的节点无法继续训练，因为进程被信号终止；" * 57  # 3.9 KB in UTF-8


def fail_large_job(num_nodes: int) -> Injection:
    """Return an injection that fails all nodes of another job with distinct messages, and measures its restart."""

    @contextmanager
    def inject(job: JobUnderTest) -> Iterator[None]:
        with run_kwok_job(job, num_nodes=num_nodes) as other:
            prefix = "attempt of the other job runs after, s"
            job.values[f"first {prefix}"] = other.wait_until_running(attempt=0, timeout_seconds=600)
            with stop_operator(job):  # otherwise it deletes the other pods after the first failure
                other.end_nodes(
                    lambda rank: build_termination(
                        exit_code=1, **RANK_KILLED, rank=rank, message=f"{rank} {MESSAGE}", progress={"step": rank}
                    )
                )
            job.values[f"next {prefix}"] = other.wait_until_running(attempt=1, timeout_seconds=600)
            job.values["verdict on the other job"] = other.read_status()["attempts"][0]["reason"]
            job.values["status of the other job, KiB"] = round(other.largest_status_bytes / 1024, 1)
        yield

    return inject


@contextmanager
def create_finished_jobs(job: JobUnderTest) -> Iterator[None]:
    """Create finished jobs while no replica runs, measure the memory of the replicas, and kill PID 1 of node 1."""
    namespace, api = f"{job.name}-done", job.installation.api
    path = f"/apis/{names.API_VERSION}/namespaces/{namespace}/{names.FINETUNEJOB[2]}"
    with create_namespace(job, namespace):
        template = f"{job.name}-template"
        job.installation.apply(build_command_job(template, numNodes=1))
        status = job.installation.wait_until_finished(template)["status"]
        with stop_operator(job):
            bodies = [build_command_job(f"done-{number}", numNodes=1) for number in range(FINISHED_JOBS)]
            created = api.send_all("POST", ((path, body) for body in bodies))
            statuses = ((f"{path}/{body['metadata']['name']}/status", {**body, "status": status}) for body in created)
            api.send_all("PUT", statuses)
        time.sleep(15)  # the leader has reconciled all jobs
        job.values["memory of a replica, MiB"] = measure_operator_memory_mib(job)
        job.kill_container(1)
        yield
        job.installation.delete(template)
        api.send("DELETE", path, timeout_seconds=120)


def measure_operator_memory_mib(job: JobUnderTest) -> float:
    """Return the resident memory of the replica that uses more."""
    memory_bytes = [
        sum(read_resident_bytes(process.pid) for process in job.chaos.find_processes(pod))
        for pod in job.list_operator_pods()
    ]
    return round(max(memory_bytes) / 2**20, 1)


def read_resident_bytes(pid: int) -> int:
    with open(f"/proc/{pid}/status") as file:
        return next((1024 * int(line.split()[1]) for line in file if line.startswith("VmRSS:")), 0)


@contextmanager
def slow_down_other_namespace(job: JobUnderTest) -> Iterator[None]:
    """Delay the pods of a large job of another namespace, and measure how fast a third namespace gets pods."""
    slow, third = f"{job.name}-slow", f"{job.name}-third"
    selector = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": slow}}}
    with (
        create_namespace(job, slow),
        create_namespace(job, third),
        register_webhook(job, allowed=True, delay_seconds=WEBHOOK_SECONDS, selector=selector),
        run_kwok_job(job, num_nodes=SLOW_NODES, suffix="slow", namespace=slow),
    ):
        time.sleep(3)  # the creates of the large job are waiting
        started_at = time.monotonic()
        with run_kwok_job(job, num_nodes=4, suffix="third", namespace=third) as other:
            wait_until(lambda: len(other.list_pods(attempt=0)) == 4, goal="4 pods created", timeout_seconds=120)
            job.values["pods of a third namespace created after, s"] = round(time.monotonic() - started_at, 1)
        job.kill_container(1)
        yield


@contextmanager
def remove_succeeded_pod(job: JobUnderTest) -> Iterator[None]:
    with run_kwok_job(job, num_nodes=2) as other:
        other.wait_until_running(attempt=0, timeout_seconds=60)
        other.end_nodes(lambda _rank: build_termination(exit_code=0, **SUCCEEDED), node_ranks=range(1, 2))
        time.sleep(15)  # the operator records a success after 10 s
        other.delete_pod(attempt=0, node_rank=1)
        restart_operator(job)
        other.end_nodes(lambda _rank: build_termination(exit_code=0, **SUCCEEDED), node_ranks=range(1))
        other.wait_until(lambda status: "completionTime" in status, goal="finished", timeout_seconds=60)
        status = other.read_status()
        job.values["phase of the other job"] = status["phase"]
        job.values["restarts of the other job"] = status.get("restarts", 0)
    yield


@contextmanager
def delete_namespace(job: JobUnderTest) -> Iterator[None]:
    """Delete the namespace of another job that runs."""
    namespace = f"{job.name}-gone"
    with create_namespace(job, namespace), run_kwok_job(job, num_nodes=4, namespace=namespace) as other:
        other.wait_until_running(attempt=0, timeout_seconds=60)
        started_at = time.monotonic()
        job.cluster.kubectl("delete", "namespace", namespace, "--timeout=120s")
        job.values["namespace gone after, s"] = round(time.monotonic() - started_at, 1)
    yield


LOAD_FAULTS = {
    "large-job-512": InjectedFault(fail_large_job(512)),
    "large-job-1000": InjectedFault(fail_large_job(1000)),
    "finished-jobs": InjectedFault(create_finished_jobs),
    "slow-webhook": InjectedFault(slow_down_other_namespace, is_isolated=True),
    "succeeded-pod-removed": InjectedFault(remove_succeeded_pod),
    "namespace-deleted": InjectedFault(delete_namespace, is_isolated=True),
}
