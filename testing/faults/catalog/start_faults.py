"""What keeps a job from starting, for a while or for good."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from finetune_operator import names
from testing.faults.catalog.fault import Fault, When, does, program
from testing.faults.job_under_test import Raw, Scene
from testing.processes.operator_stack import example_job

ROOM, SECRET, QUOTA = "chaos-room", "chaos-token", "chaos-quota"
APART = {
    "topologyKey": "kubernetes.io/hostname",
    "labelSelector": {"matchExpressions": [{"key": names.JOB_NAME, "operator": "Exists"}]},
}


@contextmanager
def no_room(scene: Scene) -> Iterator[None]:
    """Afterwards there is."""
    scene.stack.kubectl("label", "node", *scene.machines(), f"{ROOM}-")
    try:
        yield
    finally:
        scene.stack.kubectl("label", "node", *scene.machines(), f"{ROOM}=yes", "--overwrite")


@contextmanager
def room_for_one(scene: Scene) -> Iterator[None]:
    first, *_ = scene.machines()
    with no_room(scene):
        scene.stack.kubectl("label", "node", first, f"{ROOM}=yes")
        yield


@contextmanager
def no_quota(scene: Scene, *, pods: int = 0) -> Iterator[None]:
    hard = {"hard": {"pods": str(pods)}}
    scene.stack.apply({"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": QUOTA}, "spec": hard})
    try:
        wait_for_quota(scene)
        yield
    finally:
        scene.stack.kubectl("delete", "resourcequota", QUOTA)


def wait_for_quota(scene: Scene) -> None:
    """Its controller has to count first; a quota without a count allows nothing, and says so in other words."""
    deadline = time.monotonic() + 20
    while (
        not json.loads(scene.stack.kubectl("get", "resourcequota", QUOTA, "-o", "json")).get("status", {}).get("hard")
    ):
        if time.monotonic() > deadline:
            raise TimeoutError("the ResourceQuota was not counted within 20 s")
        time.sleep(0.1)


@contextmanager
def no_secret(scene: Scene) -> Iterator[None]:
    """Afterwards there is; it goes with the job's end."""
    scene.stack.kubectl("delete", "secret", SECRET, "--ignore-not-found")
    try:
        yield
    finally:
        secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": SECRET}, "stringData": {"token": "t"}}
        scene.stack.apply(secret)


@contextmanager
def no_config_map(scene: Scene) -> Iterator[None]:
    """When there is room at last, somebody has cleaned up."""
    with no_room(scene):
        yield
        scene.stack.kubectl("delete", "configmap", names.config_map_name(scene.job, 0))


@contextmanager
def no_webhook(scene: Scene) -> Iterator[None]:
    """A policy engine whose Service is gone, asked about this job's pods only."""
    rule = {"operations": ["CREATE"], "apiGroups": [""], "apiVersions": ["v1"], "resources": ["pods"]}
    hook = {
        "name": "policy.example.com",
        "rules": [rule],
        "objectSelector": {"matchLabels": {names.JOB_NAME: scene.job}},
        "clientConfig": {"service": {"name": "policy", "namespace": "default"}},
        "admissionReviewVersions": ["v1"],
        "sideEffects": "None",
        "failurePolicy": "Fail",
    }
    kind, metadata = "ValidatingWebhookConfiguration", {"name": scene.job}
    scene.stack.apply(
        {"apiVersion": "admissionregistration.k8s.io/v1", "kind": kind, "metadata": metadata, "webhooks": [hook]}
    )
    try:
        time.sleep(2)  # the API server learns of it by a watch
        yield
    finally:
        scene.stack.kubectl("delete", kind, scene.job)


@contextmanager
def no_dns(scene: Scene) -> Iterator[None]:
    dns = scene.cluster.daemon("coredns")
    dns.stop()
    try:
        yield
    finally:
        dns.start()
        scene.cluster.wait_until_dns_answers()


@contextmanager
def foreign_service(scene: Scene) -> Iterator[None]:
    spec = {"ports": [{"port": 80}], "selector": {"app": "theirs"}}
    scene.stack.apply({"apiVersion": "v1", "kind": "Service", "metadata": {"name": scene.job}, "spec": spec})
    try:
        yield
    finally:
        scene.stack.kubectl("delete", "service", scene.job)  # an error if somebody removed it


@contextmanager
def no_profile(scene: Scene) -> Iterator[None]:
    """Afterwards it is on every machine."""
    try:
        yield
    finally:
        for node in scene.cluster.layout.nodes:
            profile = node.root / "kubelet" / "seccomp" / f"{scene.job}.json"
            profile.parent.mkdir(exist_ok=True)
            profile.write_text('{"defaultAction": "SCMP_ACT_ALLOW"}')


def needs_room(**fields: Any) -> Raw:
    """A job for machines with the label only, no two nodes on the same."""
    apart = {"requiredDuringSchedulingIgnoredDuringExecution": [APART]}
    return program(podTemplate={"nodeSelector": {ROOM: "yes"}, "affinity": {"podAntiAffinity": apart}}, **fields)


def with_profile(scene: Scene) -> Raw:
    """A job whose containers ask for a seccomp profile of its own."""
    profile = {"type": "Localhost", "localhostProfile": f"{scene.job}.json"}
    restricted = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    return program(podTemplate={"containerSecurityContext": {**restricted, "seccompProfile": profile}})


def with_token_file() -> Raw:
    """A job that mounts the Secret, beside what the example mounts."""
    token = {"name": "token", "mountPath": "/token", "secret": {"secretName": SECRET}}
    return program(volumes=[*example_job("any")["spec"]["volumes"], token])


def image_without_python(scene: Scene) -> str:
    """The pause image, which every machine has."""
    (node, *_) = json.loads(scene.stack.kubectl("get", "nodes", "-o", "json"))["items"]
    listed = (str(name) for image in node["status"]["images"] for name in image["names"] or ())
    return next(name for name in listed if "pause:" in name and "@" not in name)


TOKEN = [{"name": "TOKEN", "valueFrom": {"secretKeyRef": {"name": SECRET, "key": "token"}}}]

START_FAULTS = {
    "image-missing": Fault(
        does(image="localhost/chaos/none:v0", pendingDeadlineSeconds=30), when=When.BEFORE, spares_others=True
    ),
    "image-name-invalid": Fault(does(image="localhost/Not A Name"), when=When.BEFORE, spares_others=True),
    "image-without-python": Fault(
        lambda scene: program(image=image_without_python(scene)), when=When.BEFORE, spares_others=True
    ),
    "unschedulable": Fault(lambda _: needs_room(), no_room, when=When.BEFORE, lasts_seconds=8),
    "unschedulable-for-ever": Fault(lambda _: needs_room(pendingDeadlineSeconds=10), no_room, when=When.BEFORE),
    "gang-incomplete": Fault(
        lambda _: needs_room(startupDeadlineSeconds=8, restartPolicy={"maxBackoffSeconds": 5}),
        room_for_one,
        when=When.BEFORE,
        lasts_seconds=16,
    ),
    "quota": Fault(does(), no_quota, when=When.BEFORE, lasts_seconds=8),
    "quota-incomplete": Fault(
        does(startupDeadlineSeconds=8, restartPolicy={"maxBackoffSeconds": 5}),
        partial(no_quota, pods=1),
        when=When.BEFORE,
        lasts_seconds=16,
    ),
    "webhook-down": Fault(does(), no_webhook, when=When.BEFORE, lasts_seconds=8, spares_others=True),
    "config-map-deleted": Fault(lambda _: needs_room(), no_config_map, when=When.BEFORE, lasts_seconds=8),
    "volume-missing": Fault(
        lambda _: with_token_file(), no_secret, when=When.BEFORE, lasts_seconds=65, patience_seconds=300
    ),
    "container-not-made": Fault(with_profile, no_profile, when=When.BEFORE, lasts_seconds=8, spares_others=True),
    "secret-missing": Fault(does(env=TOKEN), no_secret, when=When.BEFORE, lasts_seconds=8),
    "dns-blocked": Fault(does(), no_dns, when=When.BEFORE, lasts_seconds=20),
    "name-taken": Fault(does(), foreign_service, when=When.BEFORE, spares_others=True),
}
