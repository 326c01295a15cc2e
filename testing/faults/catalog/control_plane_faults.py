"""The API server, etcd and the operator itself go away while jobs train, start or stop."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from testing.cluster.host.commands import ClusterError
from testing.cluster.host.processes import end_processes
from testing.fakes.dead_peer import deafen_connections
from testing.faults.catalog.fault import Fault, When, does, program
from testing.faults.job_under_test import Raw, Scene
from testing.processes.operator_stack import OPERATOR_NAMESPACE


@contextmanager
def stop_api_server(scene: Scene) -> Iterator[None]:
    scene.chaos.stop_api_server()
    try:
        yield
    finally:
        scene.chaos.start_api_server()


@contextmanager
def kill_unseen(scene: Scene) -> Iterator[None]:
    """Found before the API server goes, which knows where to look."""
    first_process = scene.first_process(1)
    with stop_api_server(scene):
        end_processes([first_process], patience_seconds=0)
        yield


@contextmanager
def restart_etcd(scene: Scene) -> Iterator[None]:
    scene.chaos.restart_etcd()
    yield


@contextmanager
def kill_operators(scene: Scene) -> Iterator[None]:
    end_operators(scene)
    yield


def end_operators(scene: Scene) -> None:
    """SIGKILL, so that no Lease is given back; their pods go too, or the kubelet would make the next ones wait."""
    names = [pod["metadata"]["name"] for pod in scene.operators()]
    for name in names:
        with suppress(ClusterError):  # not running just now
            scene.chaos.kill_container(OPERATOR_NAMESPACE, name)
    scene.stack.kubectl("delete", "pod", "-n", OPERATOR_NAMESPACE, "--force", "--grace-period=0", *names)


@contextmanager
def kill_operators_amid_a_stop(scene: Scene) -> Iterator[None]:
    scene.stack.kubectl("delete", "pod", scene.pod(1), "--wait=false")
    scene.wait(
        lambda watch: bool(watch.attempts) and watch.attempts[-1]["state"] == "Stopping",
        what="stopping",
        timeout_seconds=20,
    )
    end_operators(scene)
    yield


@contextmanager
def cut_off_the_leader(scene: Scene) -> Iterator[None]:
    """The job is on the other machine, and the other replica with it."""
    machine = scene.leader()["spec"]["nodeName"]
    scene.chaos.partition(machine)
    try:
        time.sleep(1)
        scene.kill_container(1)
        yield
    finally:
        scene.chaos.heal(machine)


@contextmanager
def forget_connections(scene: Scene) -> Iterator[None]:
    """Those that the leader has now, as a load balancer does that fails over; new ones work."""
    for process in scene.chaos.processes(scene.leader()):
        deafen_connections(process.pid)
    scene.kill_container(1)
    yield


def away_from_the_leader(scene: Scene) -> Raw:
    machine = scene.leader()["spec"]["nodeName"]
    other = next(name for name in scene.machines() if name != machine)
    return program(podTemplate={"nodeSelector": {"kubernetes.io/hostname": other}})


CONTROL_PLANE_FAULTS = {
    "api-server-down": Fault(does(), stop_api_server, lasts_seconds=60),
    "killed-while-api-server-down": Fault(does(), kill_unseen, lasts_seconds=20),
    "etcd-restart": Fault(does(), restart_etcd),
    "operator-killed-starting": Fault(does(), kill_operators, when=When.STARTING),
    "operator-killed-running": Fault(does(), kill_operators),
    "operator-killed-stopping": Fault(does("--save-seconds", "5"), kill_operators_amid_a_stop),
    "connections-forgotten": Fault(does(), forget_connections),
    "leader-partitioned": Fault(away_from_the_leader, cut_off_the_leader, lasts_seconds=30),
}
