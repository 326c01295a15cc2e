"""Faults of the control plane: the API server, etcd and the operator fail while jobs train, start or stop."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from testing.cluster.host.commands import HarnessError
from testing.cluster.host.processes import terminate_processes
from testing.fakes.dead_peer import drop_incoming_packets_of
from testing.faults.catalog.fault import InjectedFault, InjectionTime, program_fields, runs_program
from testing.faults.job_under_test import JobUnderTest, RawBody
from testing.processes.operator_stack import OPERATOR_NAMESPACE


@contextmanager
def stop_api_server(job: JobUnderTest) -> Iterator[None]:
    job.chaos.stop_api_server()
    try:
        yield
    finally:
        job.chaos.start_api_server()


@contextmanager
def kill_container_without_api_server(job: JobUnderTest) -> Iterator[None]:
    """Kill PID 1 of node 1; its pid is looked up before the API server stops, because that needs the API."""
    container_pid = job.container_pid(1)
    with stop_api_server(job):
        terminate_processes([container_pid], grace_seconds=0)
        yield


@contextmanager
def restart_etcd(job: JobUnderTest) -> Iterator[None]:
    job.chaos.restart_etcd()
    yield


@contextmanager
def kill_operators(job: JobUnderTest) -> Iterator[None]:
    end_operators(job)
    yield


def end_operators(job: JobUnderTest) -> None:
    """Kill the operators with SIGKILL, so that the Lease is not released, and delete their pods.

    Otherwise the kubelet would restart the containers with a growing backoff.
    """
    names = [pod["metadata"]["name"] for pod in job.operator_pods()]
    for name in names:
        with suppress(HarnessError):  # the container is not running
            job.chaos.kill_container(OPERATOR_NAMESPACE, name)
    job.stack.kubectl("delete", "pod", "-n", OPERATOR_NAMESPACE, "--force", "--grace-period=0", *names)


@contextmanager
def kill_operators_while_stopping(job: JobUnderTest) -> Iterator[None]:
    job.stack.kubectl("delete", "pod", job.pod(1), "--wait=false")
    job.wait_until(
        lambda recorder: bool(recorder.attempts) and recorder.attempts[-1]["state"] == "Stopping",
        goal="stopping",
        timeout_seconds=20,
    )
    end_operators(job)
    yield


@contextmanager
def partition_leader(job: JobUnderTest) -> Iterator[None]:
    """Partition the Kubernetes node of the leading operator; the job and the other replica run on the other one."""
    k8s_node = job.leader()["spec"]["nodeName"]
    job.chaos.partition(k8s_node)
    try:
        time.sleep(1)
        job.kill_container(1)
        yield
    finally:
        job.chaos.heal(k8s_node)


@contextmanager
def drop_connections(job: JobUnderTest) -> Iterator[None]:
    """Drop the existing connections of the leader, as a load balancer does at failover; new ones work."""
    for process in job.chaos.find_processes(job.leader()):
        drop_incoming_packets_of(process.pid)
    job.kill_container(1)
    yield


def away_from_leader(job: JobUnderTest) -> RawBody:
    k8s_node = job.leader()["spec"]["nodeName"]
    other = next(name for name in job.k8s_node_names() if name != k8s_node)
    return program_fields(podTemplate={"nodeSelector": {"kubernetes.io/hostname": other}})


CONTROL_PLANE_FAULTS = {
    "api-server-down": InjectedFault(runs_program(), stop_api_server, duration_seconds=60),
    "killed-while-api-server-down": InjectedFault(
        runs_program(), kill_container_without_api_server, duration_seconds=20
    ),
    "etcd-restart": InjectedFault(runs_program(), restart_etcd),
    "operator-killed-starting": InjectedFault(runs_program(), kill_operators, injection_time=InjectionTime.STARTING),
    "operator-killed-running": InjectedFault(runs_program(), kill_operators),
    "operator-killed-stopping": InjectedFault(runs_program("--save-seconds", "5"), kill_operators_while_stopping),
    "connections-forgotten": InjectedFault(runs_program(), drop_connections),
    "leader-partitioned": InjectedFault(away_from_leader, partition_leader, duration_seconds=30),
}
