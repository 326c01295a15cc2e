"""Start faults, which prevent a job from starting, temporarily or permanently."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from finetune_operator import names
from testing.faults.catalog.fault import build_start_fault, make_program_fields
from testing.faults.job_under_test import JobUnderTest, RawBody
from testing.faults.training_job import build_program_fields
from testing.processes.operator_stack import build_example_job
from testing.processes.waiting import wait_until

SCHEDULABLE_LABEL, SECRET, QUOTA = "chaos-room", "chaos-token", "chaos-quota"
ONE_POD_PER_NODE = {
    "topologyKey": "kubernetes.io/hostname",
    "labelSelector": {"matchExpressions": [{"key": names.JOB_NAME, "operator": "Exists"}]},
}


@contextmanager
def make_unschedulable(job: JobUnderTest) -> Iterator[None]:
    """Remove the label in the job's nodeSelector from all Kubernetes nodes."""
    job.installation.kubectl("label", "node", *job.list_k8s_node_names(), f"{SCHEDULABLE_LABEL}-")
    try:
        yield
    finally:
        job.installation.kubectl("label", "node", *job.list_k8s_node_names(), f"{SCHEDULABLE_LABEL}=yes", "--overwrite")


@contextmanager
def allow_one_node(job: JobUnderTest) -> Iterator[None]:
    first, *_ = job.list_k8s_node_names()
    with make_unschedulable(job):
        job.installation.kubectl("label", "node", first, f"{SCHEDULABLE_LABEL}=yes")
        yield


@contextmanager
def limit_quota(job: JobUnderTest, *, pods: int = 0) -> Iterator[None]:
    spec = {"hard": {"pods": str(pods)}}
    job.installation.apply({"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": QUOTA}, "spec": spec})
    try:
        wait_until(lambda: is_quota_processed(job), goal="the ResourceQuota is processed", timeout_seconds=20)
        yield
    finally:
        job.installation.kubectl("delete", "resourcequota", QUOTA)


def is_quota_processed(job: JobUnderTest) -> bool:
    """Return whether the quota has a status; without it, all pods are rejected with another message."""
    quota = json.loads(job.installation.kubectl("get", "resourcequota", QUOTA, "-o", "json"))
    return bool(quota.get("status", {}).get("hard"))


@contextmanager
def remove_secret(job: JobUnderTest) -> Iterator[None]:
    """Delete the Secret while the fault lasts; create it on exit."""
    job.installation.kubectl("delete", "secret", SECRET, "--ignore-not-found")
    try:
        yield
    finally:
        secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": SECRET}, "stringData": {"token": "t"}}
        job.installation.apply(secret)


@contextmanager
def remove_config_map(job: JobUnderTest) -> Iterator[None]:
    """Delete the job's ConfigMap while its pods are unschedulable."""
    with make_unschedulable(job):
        yield
        job.installation.kubectl("delete", "configmap", job.get_config_map_name(attempt=0))


@contextmanager
def stop_dns(job: JobUnderTest) -> Iterator[None]:
    dns = job.cluster.find_daemon("coredns")
    dns.stop()
    try:
        yield
    finally:
        dns.start()
        job.cluster.wait_until_dns_is_ready()


@contextmanager
def create_foreign_service(job: JobUnderTest) -> Iterator[None]:
    spec = {"ports": [{"port": 80}], "selector": {"app": "theirs"}}
    job.installation.apply({"apiVersion": "v1", "kind": "Service", "metadata": {"name": job.name}, "spec": spec})
    try:
        yield
    finally:
        job.installation.kubectl("delete", "service", job.name)  # fails if the operator has already deleted the Service


@contextmanager
def remove_seccomp_profile(job: JobUnderTest) -> Iterator[None]:
    """Keep the seccomp profile uninstalled, and install it on every Kubernetes node on exit."""
    try:
        yield
    finally:
        for node in job.cluster.layout.nodes:
            profile = node.root / "kubelet" / "seccomp" / f"{job.name}.json"
            profile.parent.mkdir(exist_ok=True)
            profile.write_text('{"defaultAction": "SCMP_ACT_ALLOW"}')


def require_schedulable_label(**fields: Any) -> RawBody:
    """Return the spec fields of a job that needs labelled Kubernetes nodes and runs at most one pod on each."""
    anti_affinity = {"requiredDuringSchedulingIgnoredDuringExecution": [ONE_POD_PER_NODE]}
    return build_program_fields(
        podTemplate={"nodeSelector": {SCHEDULABLE_LABEL: "yes"}, "affinity": {"podAntiAffinity": anti_affinity}},
        **fields,
    )


def require_seccomp_profile(job: JobUnderTest) -> RawBody:
    """Return the spec fields of a job whose containers need a custom seccomp profile."""
    profile = {"type": "Localhost", "localhostProfile": f"{job.name}.json"}
    restricted_context = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    return build_program_fields(
        podTemplate={"containerSecurityContext": {**restricted_context, "seccompProfile": profile}}
    )


def mount_secret() -> RawBody:
    """Return the spec fields of a job that mounts the Secret in addition to the example job's volumes."""
    token = {"name": "token", "mountPath": "/token", "secret": {"secretName": SECRET}}
    return build_program_fields(volumes=[*build_example_job("any")["spec"]["volumes"], token])


def find_image_without_python(job: JobUnderTest) -> str:
    """Return the name of the pause image, which every Kubernetes node has."""
    (node, *_) = json.loads(job.installation.kubectl("get", "nodes", "-o", "json"))["items"]
    image_names = (str(name) for image in node["status"]["images"] for name in image["names"] or ())
    return next(name for name in image_names if "pause:" in name and "@" not in name)


TOKEN = [{"name": "TOKEN", "valueFrom": {"secretKeyRef": {"name": SECRET, "key": "token"}}}]

START_FAULTS = {
    "image-missing": build_start_fault(
        build_spec_fields=make_program_fields(image="localhost/chaos/none:v0", pendingDeadlineSeconds=30),
        is_isolated=True,
    ),
    "image-name-invalid": build_start_fault(
        build_spec_fields=make_program_fields(image="localhost/Not A Name"), is_isolated=True
    ),
    "image-without-python": build_start_fault(
        build_spec_fields=lambda job: build_program_fields(image=find_image_without_python(job)), is_isolated=True
    ),
    "unschedulable": build_start_fault(make_unschedulable, lambda _: require_schedulable_label(), duration_seconds=8),
    "unschedulable-for-ever": build_start_fault(
        make_unschedulable, lambda _: require_schedulable_label(pendingDeadlineSeconds=10)
    ),
    "gang-incomplete": build_start_fault(
        allow_one_node,
        lambda _: require_schedulable_label(startupDeadlineSeconds=8, restartPolicy={"maxBackoffSeconds": 5}),
        duration_seconds=16,
    ),
    "quota": build_start_fault(limit_quota, duration_seconds=8),
    "quota-incomplete": build_start_fault(
        partial(limit_quota, pods=1),
        make_program_fields(startupDeadlineSeconds=8, restartPolicy={"maxBackoffSeconds": 5}),
        duration_seconds=16,
    ),
    "config-map-deleted": build_start_fault(
        remove_config_map, lambda _: require_schedulable_label(), duration_seconds=8
    ),
    "volume-missing": build_start_fault(
        remove_secret, lambda _: mount_secret(), duration_seconds=65, recovery_timeout_seconds=300
    ),
    "container-not-made": build_start_fault(
        remove_seccomp_profile, require_seccomp_profile, duration_seconds=8, is_isolated=True
    ),
    "secret-missing": build_start_fault(remove_secret, make_program_fields(env=TOKEN), duration_seconds=8),
    "dns-blocked": build_start_fault(stop_dns, duration_seconds=20),
    "name-taken": build_start_fault(create_foreign_service, is_isolated=True),
}
