"""Control plane faults: the API server, etcd or the operator fails while a job starts, trains or stops."""

from __future__ import annotations

import json
import os
import signal
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from finetune_operator import names
from testing.cluster.host.commands import HarnessError
from testing.cluster.host.processes import terminate_processes
from testing.fakes.dead_peer import drop_incoming_packets_of_process
from testing.faults.catalog.fault import (
    InjectedFault,
    Injection,
    InjectionTime,
    make_program_fields,
)
from testing.faults.catalog.pod_faults import recreate_job
from testing.faults.catalog.release_faults import CRD, add_spec_field, apply_crd
from testing.faults.catalog.start_faults import stop_dns
from testing.faults.job_under_test import JobUnderTest, RawBody
from testing.faults.training_job import build_program_fields
from testing.processes.operator_stack import OPERATOR_NAMESPACE
from testing.processes.waiting import wait_until

BACKUP_AGE_SECONDS = 15
ORPHANS_TIMEOUT_SECONDS = 240
CRD_UPDATE_SECONDS = 5  # until the API server has ended the watches of the old CRD


@contextmanager
def stop_api_server(job: JobUnderTest) -> Iterator[None]:
    job.chaos.stop_api_server()
    try:
        yield
    finally:
        job.chaos.start_api_server()


@contextmanager
def kill_container_without_api_server(job: JobUnderTest) -> Iterator[None]:
    """Kill PID 1 of node 1 while the API server is stopped."""
    container_pid = job.get_container_pid(1)
    with stop_api_server(job):
        terminate_processes([container_pid], grace_seconds=0)
        yield


@contextmanager
def restart_etcd(job: JobUnderTest) -> Iterator[None]:
    job.chaos.restart_etcd()
    yield


@contextmanager
def kill_operators(job: JobUnderTest) -> Iterator[None]:
    kill_operator_pods(job)
    yield


def kill_operator_pods(job: JobUnderTest) -> None:
    """Send SIGKILL to the operators, so that they do not release the Lease, and delete their pods.

    The pods are deleted because the kubelet would restart their containers with a growing backoff.
    """
    pod_names = [pod["metadata"]["name"] for pod in job.list_operator_pods()]
    for name in pod_names:
        with suppress(HarnessError):  # kill_container fails if the container is not running
            job.chaos.kill_container(OPERATOR_NAMESPACE, name)
    job.installation.kubectl("delete", "pod", "-n", OPERATOR_NAMESPACE, "--force", "--grace-period=0", *pod_names)


@contextmanager
def kill_operators_while_stopping(job: JobUnderTest) -> Iterator[None]:
    job.installation.kubectl("delete", "pod", job.get_pod_name(1), "--wait=false")
    job.wait_until(
        lambda recorder: bool(recorder.attempts) and recorder.attempts[-1]["state"] == "Stopping",
        goal="stopping",
        timeout_seconds=20,
    )
    kill_operator_pods(job)
    yield


@contextmanager
def partition_leader(job: JobUnderTest) -> Iterator[None]:
    """Partition the Kubernetes node of the leader; the job and the other replica run on the other node."""
    k8s_node = job.find_leader()["spec"]["nodeName"]
    job.chaos.partition(k8s_node)
    try:
        time.sleep(1)
        job.kill_container(1)
        yield
    finally:
        job.chaos.heal(k8s_node)


@contextmanager
def drop_connections(job: JobUnderTest) -> Iterator[None]:
    """Drop the existing connections of the leader, as a load balancer does at failover; new connections work."""
    for process in job.chaos.find_processes(job.find_leader()):
        drop_incoming_packets_of_process(process.pid)
    job.kill_container(1)
    yield


@contextmanager
def pause_operators(job: JobUnderTest, pods: Sequence[RawBody], seconds: float) -> Iterator[None]:
    """Stop these replicas with SIGSTOP; the block runs in the middle of the pause."""
    for pod in pods:
        job.chaos.signal_pod(pod, signal.SIGSTOP)
    try:
        time.sleep(seconds / 2)
        yield
        time.sleep(seconds / 2)
    finally:
        for pod in pods:
            job.chaos.signal_pod(pod, signal.SIGCONT)


def pause_leader(seconds: float) -> Injection:
    """Return an injection that pauses the leader and then kills PID 1 of node 1."""

    @contextmanager
    def inject(job: JobUnderTest) -> Iterator[None]:
        with pause_operators(job, [job.find_leader()], seconds):
            pass
        job.kill_container(1)
        yield

    return inject


@contextmanager
def pause_all_operators(job: JobUnderTest) -> Iterator[None]:
    with pause_operators(job, job.list_operator_pods(), 25):
        job.kill_container(1)
    yield


@contextmanager
def stop_controller_manager(job: JobUnderTest) -> Iterator[None]:
    """Stop the controller manager and kill PID 1 of node 1."""
    daemon = job.cluster.find_daemon("kube-controller-manager")
    daemon.stop()
    try:
        job.kill_container(1)
        yield
    finally:
        daemon.start()


@contextmanager
def stop_dns_and_kill_container(job: JobUnderTest) -> Iterator[None]:
    with stop_dns(job):
        job.kill_container(1)
        yield


@contextmanager
def recreate_crd(job: JobUnderTest) -> Iterator[None]:
    """Delete the CRD and with it all jobs, and apply both again."""
    crd = json.loads(job.installation.kubectl("get", CRD, "-o", "json"))
    manifest = job.installation.get_job(job.name)
    job.installation.kubectl("delete", CRD, "--timeout=120s")
    apply_crd(job, crd)
    job.installation.kubectl("wait", "--for=condition=Established", CRD, "--timeout=60s")
    job.installation.apply({**{k: manifest[k] for k in ("apiVersion", "kind", "spec")}, "metadata": {"name": job.name}})
    yield


@contextmanager
def recreate_job_unobserved(job: JobUnderTest) -> Iterator[None]:
    """Delete the job and apply it again, so that the garbage collector of Kubernetes does not observe the deletion.

    The controller manager is stopped by SIGSTOP, and a change of the CRD ends its watch before the deletion. In the
    next LIST the name exists, so its informer reports a modified job with another uid instead of a deletion.
    """
    uid = job.installation.get_job(job.name)["metadata"]["uid"]
    crd = json.loads(job.installation.kubectl("get", CRD, "-o", "json"))
    pid = job.cluster.find_daemon("kube-controller-manager").pid()
    if pid is None:
        raise HarnessError("kube-controller-manager does not run")
    os.kill(pid, signal.SIGSTOP)
    try:
        apply_crd(job, add_spec_field(crd, "note"))
        time.sleep(CRD_UPDATE_SECONDS)
        with recreate_job(job):
            pass
    finally:
        os.kill(pid, signal.SIGCONT)
    try:
        list_children = ("get", "pods,services,configmaps", "-l", f"{names.JOB_UID}={uid}", "-o", "name")
        job.values["children of the deleted job gone after, s"] = wait_until(
            lambda: not job.installation.kubectl(*list_children).split(),
            goal="the children of the deleted job are gone",
            timeout_seconds=ORPHANS_TIMEOUT_SECONDS,
            interval_seconds=1,
        )
        yield
    finally:
        apply_crd(job, crd)


@contextmanager
def restore_etcd(job: JobUnderTest) -> Iterator[None]:
    """Restore etcd from a backup of 15 s before, and kill PID 1 of node 1."""
    with tempfile.TemporaryDirectory() as folder:
        backup = Path(folder) / "etcd"
        job.chaos.back_up_etcd(backup)
        time.sleep(BACKUP_AGE_SECONDS)
        job.chaos.restore_etcd(backup)
    job.cluster.wait_until_ready()
    job.kill_container(1)
    yield


def avoid_leader_node(job: JobUnderTest) -> RawBody:
    k8s_node = job.find_leader()["spec"]["nodeName"]
    other = next(name for name in job.list_k8s_node_names() if name != k8s_node)
    return build_program_fields(podTemplate={"nodeSelector": {"kubernetes.io/hostname": other}})


CONTROL_PLANE_FAULTS = {
    "api-server-down": InjectedFault(stop_api_server, duration_seconds=60),
    "killed-while-api-server-down": InjectedFault(kill_container_without_api_server, duration_seconds=20),
    "etcd-restart": InjectedFault(restart_etcd),
    "operator-killed-starting": InjectedFault(kill_operators, injection_time=InjectionTime.STARTING),
    "operator-killed-running": InjectedFault(kill_operators),
    "operator-killed-stopping": InjectedFault(
        kill_operators_while_stopping, make_program_fields("--save-seconds", "5")
    ),
    "connections-forgotten": InjectedFault(drop_connections),
    "leader-paused-4": InjectedFault(pause_leader(4), recovery_timeout_seconds=60),
    "leader-paused-12": InjectedFault(pause_leader(12), recovery_timeout_seconds=60),
    "leader-paused-25": InjectedFault(pause_leader(25), recovery_timeout_seconds=60),
    "operators-paused-25": InjectedFault(pause_all_operators, recovery_timeout_seconds=60),
    "controller-manager-down": InjectedFault(stop_controller_manager, duration_seconds=20),
    "dns-down-restart": InjectedFault(stop_dns_and_kill_container, duration_seconds=20),
    "crd-recreated": InjectedFault(recreate_crd, recovery_timeout_seconds=240),
    "applied-again-unobserved": InjectedFault(recreate_job_unobserved, recovery_timeout_seconds=300),
    "etcd-restored": InjectedFault(restore_etcd, recovery_timeout_seconds=300),
    "leader-partitioned": InjectedFault(partition_leader, avoid_leader_node, duration_seconds=30),
}
