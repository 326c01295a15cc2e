"""What people, kubelets and schedulers do to pods, and what becomes of the machines below them."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager

from finetune_operator import names
from testing.cluster.images.project_images import image_name
from testing.faults.catalog.fault import Fault, does
from testing.faults.job_under_test import Raw, Scene

PREEMPTOR = "chaos-preemptor"
OUT_OF_SERVICE = "node.kubernetes.io/out-of-service=nodeshutdown:NoExecute"
SOON = {  # away from a machine that is lost, and not only after a minute
    "tolerations": [
        {"key": f"node.kubernetes.io/{key}", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 5}
        for key in ("not-ready", "unreachable")
    ]
}


@contextmanager
def kill_container(scene: Scene) -> Iterator[None]:
    scene.kill_container(1)
    yield


@contextmanager
def delete_pod(scene: Scene) -> Iterator[None]:
    scene.stack.kubectl("delete", "pod", scene.pod(1), "--wait=false")
    yield


@contextmanager
def delete_pod_in_a_hurry(scene: Scene) -> Iterator[None]:
    scene.stack.kubectl("delete", "pod", scene.pod(1), "--wait=false", "--grace-period=15")
    yield


@contextmanager
def evict_pod(scene: Scene) -> Iterator[None]:
    namespace, pod = scene.stack.namespace, scene.pod(1)
    body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": pod, "namespace": namespace}}
    path = f"/api/v1/namespaces/{namespace}/pods/{pod}/eviction"
    scene.stack.kubectl("create", "--raw", path, "-f", "-", stdin=json.dumps(body))
    yield


@contextmanager
def drain(scene: Scene) -> Iterator[None]:
    machine = scene.machine(1)
    try:
        scene.stack.kubectl("drain", machine, "--ignore-daemonsets", "--delete-emptydir-data", "--timeout=90s")
        yield
    finally:
        scene.stack.kubectl("uncordon", machine)


@contextmanager
def preempt(scene: Scene) -> Iterator[None]:
    """In a namespace of its own kind of security: it is no job."""
    priority = {"apiVersion": "scheduling.k8s.io/v1", "kind": "PriorityClass", "value": 1000}
    container = {"name": "sleep", "image": image_name("operator"), "command": ["sleep", "600"]}
    scene.cluster.kubectl.apply(
        {**priority, "metadata": {"name": PREEMPTOR}, "description": "of the fault matrix"},
        {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": PREEMPTOR, "namespace": "default"},
            "spec": {
                "nodeSelector": {"kubernetes.io/hostname": scene.machine(1)},
                "priorityClassName": PREEMPTOR,
                "terminationGracePeriodSeconds": 0,
                "containers": [
                    {**container, "imagePullPolicy": "Never", "resources": {"requests": {"cpu": "1500m"}}},
                ],
            },
        },
    )
    try:
        yield
    finally:
        scene.stack.kubectl("delete", "pod", "-n", "default", PREEMPTOR, "--force", "--grace-period=0")
        scene.stack.kubectl("delete", "priorityclass", PREEMPTOR)


@contextmanager
def relabel_pod(scene: Scene) -> Iterator[None]:
    scene.stack.kubectl("label", "pod", scene.pod(1), f"{names.JOB_UID}-")
    yield


@contextmanager
def edit_image(scene: Scene) -> Iterator[None]:
    """To one in which the same program would run."""
    scene.stack.kubectl("set", "image", f"pod/{scene.pod(1)}", f"{names.CONTAINER}={image_name('trainer')}")
    yield


@contextmanager
def take_next_name(scene: Scene) -> Iterator[None]:
    name = names.config_map_name(scene.job, 1)
    scene.stack.apply({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}, "data": {"theirs": "1"}})
    scene.kill_container(1)
    try:
        yield
    finally:
        scene.stack.kubectl("delete", "configmap", name)  # an error if somebody removed it


@contextmanager
def delete_service(scene: Scene) -> Iterator[None]:
    scene.stack.kubectl("delete", "service", scene.job)
    scene.kill_container(1)
    yield


@contextmanager
def edit_service(scene: Scene) -> Iterator[None]:
    def selector() -> str:
        return scene.stack.kubectl("get", "service", scene.job, "-o", "jsonpath={.spec.selector}", "--ignore-not-found")

    before = selector()
    scene.stack.kubectl("patch", "service", scene.job, "--type=merge", "-p", '{"spec":{"selector":{"app":"theirs"}}}')
    deadline = time.monotonic() + 20
    while (now := selector()) != before:
        if time.monotonic() > deadline:
            raise TimeoutError(f"the Service still selects {now or 'nothing'} after 20 s")
        time.sleep(0.1)
    scene.kill_container(1)
    yield


@contextmanager
def apply_again(scene: Scene) -> Iterator[None]:
    job = json.loads(scene.stack.kubectl("get", "ftj", scene.job, "-o", "json"))
    scene.stack.kubectl("delete", "ftj", scene.job)
    scene.stack.apply({**{k: job[k] for k in ("apiVersion", "kind", "spec")}, "metadata": {"name": scene.job}})
    yield


@contextmanager
def stop_kubelet(scene: Scene) -> Iterator[None]:
    machine = scene.machine(1)
    scene.chaos.stop_kubelet(machine)
    try:
        yield
    finally:
        scene.chaos.start_kubelet(machine)


@contextmanager
def partition(scene: Scene) -> Iterator[None]:
    machine = scene.machine(1)
    scene.chaos.partition(machine)
    try:
        yield
    finally:
        scene.chaos.heal(machine)


@contextmanager
def delete_node(scene: Scene) -> Iterator[None]:
    machine = scene.machine(1)
    scene.chaos.stop_kubelet(machine)
    try:
        scene.stack.kubectl("delete", "node", machine)
        yield
    finally:
        scene.chaos.start_kubelet(machine)  # which registers it anew


@contextmanager
def take_out_of_service(scene: Scene) -> Iterator[None]:
    """As people do who know that the machine is off."""
    machine = scene.machine(1)
    scene.chaos.stop_kubelet(machine)
    try:
        wait_until_unready(scene, machine)
        scene.stack.kubectl("taint", "node", machine, OUT_OF_SERVICE)
        yield
    finally:
        scene.stack.kubectl("taint", "node", machine, f"{OUT_OF_SERVICE.partition('=')[0]}-")
        scene.chaos.start_kubelet(machine)


def wait_until_unready(scene: Scene, machine: str) -> None:
    deadline = time.monotonic() + 60
    while machine in scene.cluster.kubectl.ready_nodes():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{machine} is still Ready a minute after its kubelet was stopped")
        time.sleep(0.5)


def requests(cpu: str) -> Raw:
    return {"requests": {"cpu": cpu}}


POD_FAULTS = {
    "container-kill": Fault(does(), kill_container, spares_others=True),
    "pod-delete": Fault(does(), delete_pod, spares_others=True),
    "pod-evict": Fault(does(), evict_pod, spares_others=True),
    "drain": Fault(does(), drain),
    "preemption": Fault(does(resources=requests("1100m")), preempt, lasts_seconds=8),
    "sigterm-ignored": Fault(does("--ignore-sigterm"), delete_pod_in_a_hurry, spares_others=True),
    "service-deleted": Fault(does(), delete_service, spares_others=True),
    "service-edited": Fault(does(), edit_service, spares_others=True),
    "image-edited": Fault(does(), edit_image, spares_others=True),
    "name-taken-later": Fault(does(), take_next_name, lasts_seconds=8, spares_others=True),
    "pod-relabelled": Fault(does(), relabel_pod, spares_others=True),
    "applied-again": Fault(does(), apply_again, spares_others=True),
}

MACHINE_FAULTS = {
    "kubelet-stop": Fault(does(podTemplate=SOON), stop_kubelet, patience_seconds=330),
    "kubelet-restart": Fault(does(), stop_kubelet, lasts_seconds=10),
    "partition": Fault(does("--patience", "15", podTemplate=SOON), partition, patience_seconds=240),
    "partition-healed": Fault(does(), partition, lasts_seconds=6),
    "node-delete": Fault(does(), delete_node, patience_seconds=330),
    "out-of-service": Fault(does(), take_out_of_service, patience_seconds=330),
}
