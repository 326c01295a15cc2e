"""Faults that keep a job from starting, temporarily or permanently."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from finetune_operator import names
from testing.faults.catalog.fault import InjectedFault, InjectionTime, program_fields, runs_program
from testing.faults.job_under_test import JobUnderTest, RawBody
from testing.processes.operator_stack import example_job

ROOM_LABEL, SECRET, QUOTA = "chaos-room", "chaos-token", "chaos-quota"
ONE_POD_PER_NODE = {
    "topologyKey": "kubernetes.io/hostname",
    "labelSelector": {"matchExpressions": [{"key": names.JOB_NAME, "operator": "Exists"}]},
}


@contextmanager
def remove_room(job: JobUnderTest) -> Iterator[None]:
    """Remove the label that the job's nodeSelector needs from all Kubernetes nodes."""
    job.stack.kubectl("label", "node", *job.k8s_node_names(), f"{ROOM_LABEL}-")
    try:
        yield
    finally:
        job.stack.kubectl("label", "node", *job.k8s_node_names(), f"{ROOM_LABEL}=yes", "--overwrite")


@contextmanager
def leave_room_for_one(job: JobUnderTest) -> Iterator[None]:
    first, *_ = job.k8s_node_names()
    with remove_room(job):
        job.stack.kubectl("label", "node", first, f"{ROOM_LABEL}=yes")
        yield


@contextmanager
def limit_quota(job: JobUnderTest, *, pods: int = 0) -> Iterator[None]:
    spec = {"hard": {"pods": str(pods)}}
    job.stack.apply({"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": QUOTA}, "spec": spec})
    try:
        wait_for_quota(job)
        yield
    finally:
        job.stack.kubectl("delete", "resourcequota", QUOTA)


def wait_for_quota(job: JobUnderTest) -> None:
    """Wait until the quota controller has counted: before, the quota rejects everything with another message."""
    deadline = time.monotonic() + 20
    while not json.loads(job.stack.kubectl("get", "resourcequota", QUOTA, "-o", "json")).get("status", {}).get("hard"):
        if time.monotonic() > deadline:
            raise TimeoutError("the ResourceQuota was not processed within 20 s")
        time.sleep(0.1)


@contextmanager
def remove_secret(job: JobUnderTest) -> Iterator[None]:
    """Remove the Secret and create it afterwards."""
    job.stack.kubectl("delete", "secret", SECRET, "--ignore-not-found")
    try:
        yield
    finally:
        secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": SECRET}, "stringData": {"token": "t"}}
        job.stack.apply(secret)


@contextmanager
def remove_config_map(job: JobUnderTest) -> Iterator[None]:
    """Delete the job's ConfigMap while its pods are unschedulable."""
    with remove_room(job):
        yield
        job.stack.kubectl("delete", "configmap", job.config_map(attempt=0))


@contextmanager
def break_webhook(job: JobUnderTest) -> Iterator[None]:
    """Register an admission webhook for this job's pods whose Service does not exist."""
    rule = {"operations": ["CREATE"], "apiGroups": [""], "apiVersions": ["v1"], "resources": ["pods"]}
    hook = {
        "name": "policy.example.com",
        "rules": [rule],
        "objectSelector": {"matchLabels": {names.JOB_NAME: job.name}},
        "clientConfig": {"service": {"name": "policy", "namespace": "default"}},
        "admissionReviewVersions": ["v1"],
        "sideEffects": "None",
        "failurePolicy": "Fail",
    }
    kind, metadata = "ValidatingWebhookConfiguration", {"name": job.name}
    job.stack.apply(
        {"apiVersion": "admissionregistration.k8s.io/v1", "kind": kind, "metadata": metadata, "webhooks": [hook]}
    )
    try:
        time.sleep(2)  # the API server loads webhooks asynchronously
        yield
    finally:
        job.stack.kubectl("delete", kind, job.name)


@contextmanager
def stop_dns(job: JobUnderTest) -> Iterator[None]:
    dns = job.cluster.daemon("coredns")
    dns.stop()
    try:
        yield
    finally:
        dns.start()
        job.cluster.wait_until_dns_is_ready()


@contextmanager
def create_foreign_service(job: JobUnderTest) -> Iterator[None]:
    spec = {"ports": [{"port": 80}], "selector": {"app": "theirs"}}
    job.stack.apply({"apiVersion": "v1", "kind": "Service", "metadata": {"name": job.name}, "spec": spec})
    try:
        yield
    finally:
        job.stack.kubectl("delete", "service", job.name)  # fails if the operator removed it


@contextmanager
def remove_seccomp_profile(job: JobUnderTest) -> Iterator[None]:
    """Install the seccomp profile on every Kubernetes node only afterwards."""
    try:
        yield
    finally:
        for node in job.cluster.layout.nodes:
            profile = node.root / "kubelet" / "seccomp" / f"{job.name}.json"
            profile.parent.mkdir(exist_ok=True)
            profile.write_text('{"defaultAction": "SCMP_ACT_ALLOW"}')


def needs_room_label(**fields: Any) -> RawBody:
    """Return the fields of a job for labelled Kubernetes nodes only, with at most one pod per Kubernetes node."""
    anti_affinity = {"requiredDuringSchedulingIgnoredDuringExecution": [ONE_POD_PER_NODE]}
    return program_fields(
        podTemplate={"nodeSelector": {ROOM_LABEL: "yes"}, "affinity": {"podAntiAffinity": anti_affinity}}, **fields
    )


def with_seccomp_profile(job: JobUnderTest) -> RawBody:
    """Return the fields of a job whose containers need a seccomp profile of their own."""
    profile = {"type": "Localhost", "localhostProfile": f"{job.name}.json"}
    restricted = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    return program_fields(podTemplate={"containerSecurityContext": {**restricted, "seccompProfile": profile}})


def with_token_file() -> RawBody:
    """Return the fields of a job that mounts the Secret besides the example's volumes."""
    token = {"name": "token", "mountPath": "/token", "secret": {"secretName": SECRET}}
    return program_fields(volumes=[*example_job("any")["spec"]["volumes"], token])


def image_without_python(job: JobUnderTest) -> str:
    """Return the name of the pause image, which every Kubernetes node has."""
    (node, *_) = json.loads(job.stack.kubectl("get", "nodes", "-o", "json"))["items"]
    image_names = (str(name) for image in node["status"]["images"] for name in image["names"] or ())
    return next(name for name in image_names if "pause:" in name and "@" not in name)


TOKEN = [{"name": "TOKEN", "valueFrom": {"secretKeyRef": {"name": SECRET, "key": "token"}}}]

START_FAULTS = {
    "image-missing": InjectedFault(
        runs_program(image="localhost/chaos/none:v0", pendingDeadlineSeconds=30),
        injection_time=InjectionTime.BEFORE,
        is_isolated=True,
    ),
    "image-name-invalid": InjectedFault(
        runs_program(image="localhost/Not A Name"), injection_time=InjectionTime.BEFORE, is_isolated=True
    ),
    "image-without-python": InjectedFault(
        lambda job: program_fields(image=image_without_python(job)),
        injection_time=InjectionTime.BEFORE,
        is_isolated=True,
    ),
    "unschedulable": InjectedFault(
        lambda _: needs_room_label(), remove_room, injection_time=InjectionTime.BEFORE, duration_seconds=8
    ),
    "unschedulable-for-ever": InjectedFault(
        lambda _: needs_room_label(pendingDeadlineSeconds=10), remove_room, injection_time=InjectionTime.BEFORE
    ),
    "gang-incomplete": InjectedFault(
        lambda _: needs_room_label(startupDeadlineSeconds=8, restartPolicy={"maxBackoffSeconds": 5}),
        leave_room_for_one,
        injection_time=InjectionTime.BEFORE,
        duration_seconds=16,
    ),
    "quota": InjectedFault(runs_program(), limit_quota, injection_time=InjectionTime.BEFORE, duration_seconds=8),
    "quota-incomplete": InjectedFault(
        runs_program(startupDeadlineSeconds=8, restartPolicy={"maxBackoffSeconds": 5}),
        partial(limit_quota, pods=1),
        injection_time=InjectionTime.BEFORE,
        duration_seconds=16,
    ),
    "webhook-down": InjectedFault(
        runs_program(), break_webhook, injection_time=InjectionTime.BEFORE, duration_seconds=8, is_isolated=True
    ),
    "config-map-deleted": InjectedFault(
        lambda _: needs_room_label(), remove_config_map, injection_time=InjectionTime.BEFORE, duration_seconds=8
    ),
    "volume-missing": InjectedFault(
        lambda _: with_token_file(),
        remove_secret,
        injection_time=InjectionTime.BEFORE,
        duration_seconds=65,
        recovery_timeout_seconds=300,
    ),
    "container-not-made": InjectedFault(
        with_seccomp_profile,
        remove_seccomp_profile,
        injection_time=InjectionTime.BEFORE,
        duration_seconds=8,
        is_isolated=True,
    ),
    "secret-missing": InjectedFault(
        runs_program(env=TOKEN), remove_secret, injection_time=InjectionTime.BEFORE, duration_seconds=8
    ),
    "dns-blocked": InjectedFault(runs_program(), stop_dns, injection_time=InjectionTime.BEFORE, duration_seconds=20),
    "name-taken": InjectedFault(
        runs_program(), create_foreign_service, injection_time=InjectionTime.BEFORE, is_isolated=True
    ),
}
