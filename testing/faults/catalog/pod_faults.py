"""Pod and Kubernetes node faults, caused by users, kubelets and the scheduler."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from finetune_operator import names
from testing.cluster.images.project_images import get_image_name
from testing.faults.catalog.fault import InjectedFault, InjectionTime, make_program_fields
from testing.faults.job_under_test import JobUnderTest, RawBody
from testing.processes.waiting import wait_until

PREEMPTOR = "chaos-preemptor"
FINALIZER = "example.com/backup"  # of another controller
SPOT_NOTICE_SECONDS = 30  # grace period of a reclaimed spot instance
OUT_OF_SERVICE = "node.kubernetes.io/out-of-service=nodeshutdown:NoExecute"
SHORT_TOLERATIONS = {  # evict pods from a lost Kubernetes node after 5 s instead of a minute
    "tolerations": [
        {"key": f"node.kubernetes.io/{key}", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 5}
        for key in ("not-ready", "unreachable")
    ]
}


@contextmanager
def kill_container(job: JobUnderTest) -> Iterator[None]:
    job.kill_container(1)
    yield


@contextmanager
def delete_pod(job: JobUnderTest, *, options: tuple[str, ...] = ()) -> Iterator[None]:
    job.installation.kubectl("delete", "pod", job.get_pod_name(1), "--wait=false", *options)
    yield


@contextmanager
def delete_pod_during_start(job: JobUnderTest) -> Iterator[None]:
    """Delete the pod of node 1 as soon as it exists, while its container is being started."""
    job.installation.kubectl("wait", "--for=create", f"pod/{job.get_pod_name(1)}", "--timeout=20s")
    with delete_pod(job):
        yield


@contextmanager
def evict_pod(job: JobUnderTest, *, grace_seconds: int | None = None) -> Iterator[None]:
    """Evict the pod of node 1, by default with its own grace period."""
    namespace, pod = job.installation.namespace, job.get_pod_name(1)
    body: RawBody = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": pod, "namespace": namespace}}
    if grace_seconds is not None:
        body["deleteOptions"] = {"gracePeriodSeconds": grace_seconds}
    path = f"/api/v1/namespaces/{namespace}/pods/{pod}/eviction"
    job.installation.kubectl("create", "--raw", path, "-f", "-", stdin=json.dumps(body))
    yield


@contextmanager
def drain_node(job: JobUnderTest) -> Iterator[None]:
    k8s_node = job.get_k8s_node(1)
    try:
        job.installation.kubectl("drain", k8s_node, "--ignore-daemonsets", "--delete-emptydir-data", "--timeout=90s")
        yield
    finally:
        job.installation.kubectl("uncordon", k8s_node)


@contextmanager
def preempt_pod(job: JobUnderTest) -> Iterator[None]:
    """Create a pod of higher priority that needs the resources of node 1."""
    priority = {"apiVersion": "scheduling.k8s.io/v1", "kind": "PriorityClass", "value": 1000}
    container = {"name": "sleep", "image": get_image_name("operator"), "command": ["sleep", "600"]}
    job.cluster.kubectl.apply(
        {**priority, "metadata": {"name": PREEMPTOR}, "description": "of the fault matrix"},
        {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": PREEMPTOR, "namespace": "default"},
            "spec": {
                "nodeSelector": {"kubernetes.io/hostname": job.get_k8s_node(1)},
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
        job.installation.kubectl("delete", "pod", "-n", "default", PREEMPTOR, "--force", "--grace-period=0")
        job.installation.kubectl("delete", "priorityclass", PREEMPTOR)


@contextmanager
def relabel_pod(job: JobUnderTest) -> Iterator[None]:
    job.installation.kubectl("label", "pod", job.get_pod_name(1), f"{names.JOB_UID}-")
    yield


@contextmanager
def edit_image(job: JobUnderTest) -> Iterator[None]:
    """Replace the image of a pod by another image that can run the same program."""
    job.installation.kubectl(
        "set", "image", f"pod/{job.get_pod_name(1)}", f"{names.CONTAINER}={get_image_name('trainer')}"
    )
    yield


@contextmanager
def take_next_config_map_name(job: JobUnderTest) -> Iterator[None]:
    name = job.get_config_map_name(attempt=1)
    job.installation.apply(
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}, "data": {"theirs": "1"}}
    )
    job.kill_container(1)
    try:
        yield
    finally:
        job.installation.kubectl("delete", "configmap", name)  # fails if the operator has already deleted the ConfigMap


@contextmanager
def delete_service(job: JobUnderTest) -> Iterator[None]:
    job.installation.kubectl("delete", "service", job.name)
    job.kill_container(1)
    yield


@contextmanager
def edit_service(job: JobUnderTest) -> Iterator[None]:
    def get_selector() -> str:
        return job.installation.kubectl(
            "get", "service", job.name, "-o", "jsonpath={.spec.selector}", "--ignore-not-found"
        )

    original_selector = get_selector()
    job.installation.kubectl(
        "patch", "service", job.name, "--type=merge", "-p", '{"spec":{"selector":{"app":"theirs"}}}'
    )
    wait_until(lambda: get_selector() == original_selector, goal="the Service has its selector", timeout_seconds=20)
    job.kill_container(1)
    yield


@contextmanager
def recreate_job(job: JobUnderTest) -> Iterator[None]:
    manifest = json.loads(job.installation.kubectl("get", "ftj", job.name, "-o", "json"))
    job.installation.kubectl("delete", "ftj", job.name)
    job.installation.apply({**{k: manifest[k] for k in ("apiVersion", "kind", "spec")}, "metadata": {"name": job.name}})
    yield


def patch_pod(job: JobUnderTest, patch: RawBody, *options: str) -> None:
    """Apply a merge patch to the pod of node 1."""
    job.installation.kubectl("patch", "pod", job.get_pod_name(1), "--type=merge", "-p", json.dumps(patch), *options)


@contextmanager
def set_pod_deadline(job: JobUnderTest) -> Iterator[None]:
    patch_pod(job, {"spec": {"activeDeadlineSeconds": 1}})
    yield


@contextmanager
def add_finalizer(job: JobUnderTest) -> Iterator[None]:
    """Add a finalizer to the pod of node 1 and delete the pod; remove the finalizer when the job trains again."""
    patch_pod(job, {"metadata": {"finalizers": [FINALIZER]}})
    try:
        job.installation.kubectl("delete", "pod", job.get_pod_name(1), "--wait=false")
        yield
    finally:
        patch_pod(job, {"metadata": {"finalizers": None}})


@contextmanager
def resize_and_debug_pod(job: JobUnderTest) -> Iterator[None]:
    pod = job.get_pod_name(1)
    containers = [{"name": names.CONTAINER, "resources": {"requests": {"cpu": "150m"}}}]
    patch = json.dumps({"spec": {"containers": containers}})
    job.installation.kubectl("patch", "pod", pod, "--subresource=resize", "--type=strategic", "-p", patch)
    debug = ("debug", pod, f"--image={get_image_name('operator')}", "--profile=restricted", "--container=debugger")
    job.installation.kubectl(*debug, "--image-pull-policy=Never", "--", "sleep", "5")
    time.sleep(8)
    body = job.chaos.get_pod(job.installation.namespace, pod)
    job.values["ephemeral containers"] = len(body["spec"].get("ephemeralContainers", ()))
    job.values["CPU request"] = body["spec"]["containers"][0]["resources"]["requests"]["cpu"]
    yield


@contextmanager
def stop_kubelet(job: JobUnderTest) -> Iterator[None]:
    k8s_node = job.get_k8s_node(1)
    job.chaos.stop_kubelet(k8s_node)
    try:
        yield
    finally:
        job.chaos.start_kubelet(k8s_node)


@contextmanager
def partition_node(job: JobUnderTest) -> Iterator[None]:
    k8s_node = job.get_k8s_node(1)
    job.chaos.partition(k8s_node)
    try:
        yield
    finally:
        job.chaos.heal(k8s_node)


@contextmanager
def delete_node(job: JobUnderTest) -> Iterator[None]:
    k8s_node = job.get_k8s_node(1)
    job.chaos.stop_kubelet(k8s_node)
    try:
        job.installation.kubectl("delete", "node", k8s_node)
        yield
    finally:
        job.chaos.start_kubelet(k8s_node)  # the kubelet registers the Node again
        job.chaos.start_kube_proxy(k8s_node)


@contextmanager
def taint_node_out_of_service(job: JobUnderTest) -> Iterator[None]:
    """Stop the kubelet and taint the Node as out of service, as administrators do after a power failure of a host."""
    k8s_node = job.get_k8s_node(1)
    job.chaos.stop_kubelet(k8s_node)
    try:
        wait_until(lambda: k8s_node not in job.cluster.kubectl.list_ready_nodes(), goal=f"{k8s_node} is not Ready")
        job.installation.kubectl("taint", "node", k8s_node, OUT_OF_SERVICE)
        yield
    finally:
        job.installation.kubectl("taint", "node", k8s_node, f"{OUT_OF_SERVICE.partition('=')[0]}-")
        job.chaos.start_kubelet(k8s_node)


def build_cpu_request(cpu: str) -> RawBody:
    return {"requests": {"cpu": cpu}}


POD_FAULTS = {
    "container-kill": InjectedFault(kill_container, is_isolated=True),
    "pod-delete": InjectedFault(delete_pod, is_isolated=True),
    "pod-delete-start": InjectedFault(delete_pod_during_start, injection_time=InjectionTime.STARTING, is_isolated=True),
    "pod-evict": InjectedFault(evict_pod, is_isolated=True),
    "drain": InjectedFault(drain_node),
    "preemption": InjectedFault(
        preempt_pod, make_program_fields(resources=build_cpu_request("1100m")), duration_seconds=8
    ),
    "sigterm-ignored": InjectedFault(
        partial(delete_pod, options=("--grace-period=15",)), make_program_fields("--ignore-sigterm"), is_isolated=True
    ),
    "service-deleted": InjectedFault(delete_service, is_isolated=True),
    "service-edited": InjectedFault(edit_service, is_isolated=True),
    "image-edited": InjectedFault(edit_image, is_isolated=True),
    "name-taken-later": InjectedFault(take_next_config_map_name, duration_seconds=8, is_isolated=True),
    "pod-relabelled": InjectedFault(relabel_pod, is_isolated=True),
    "pod-deadline": InjectedFault(set_pod_deadline, is_isolated=True),
    "pod-finalizer": InjectedFault(add_finalizer, is_isolated=True),
    "pod-debugged": InjectedFault(resize_and_debug_pod, is_isolated=True),
    "spot-reclaim": InjectedFault(
        partial(evict_pod, grace_seconds=SPOT_NOTICE_SECONDS),
        make_program_fields("--save-seconds", "15"),
        is_isolated=True,
    ),
    "applied-again": InjectedFault(recreate_job, is_isolated=True),
}

K8S_NODE_FAULTS = {
    "kubelet-stop": InjectedFault(
        stop_kubelet, make_program_fields(podTemplate=SHORT_TOLERATIONS), recovery_timeout_seconds=330
    ),
    "kubelet-restart": InjectedFault(stop_kubelet, duration_seconds=10),
    "partition": InjectedFault(
        partition_node,
        make_program_fields("--peer-timeout", "15", podTemplate=SHORT_TOLERATIONS),
        recovery_timeout_seconds=240,
    ),
    "partition-healed": InjectedFault(partition_node, duration_seconds=6),
    "node-delete": InjectedFault(delete_node, recovery_timeout_seconds=330),
    "out-of-service": InjectedFault(taint_node_out_of_service, recovery_timeout_seconds=330),
}
