"""What keeps a job from starting, for a while or for good."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from chaos.fault import Fault, When, does, program
from chaos.scene import Raw, Scene
from finetune_operator import names

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
def no_quota(scene: Scene) -> Iterator[None]:
    hard = {"hard": {"pods": "0"}}
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


def needs_room(**fields: Any) -> Raw:
    """A job for machines with the label only, no two nodes on the same."""
    apart = {"requiredDuringSchedulingIgnoredDuringExecution": [APART]}
    return program(podTemplate={"nodeSelector": {ROOM: "yes"}, "affinity": {"podAntiAffinity": apart}}, **fields)


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
    "secret-missing": Fault(does(env=TOKEN), no_secret, when=When.BEFORE, lasts_seconds=8),
    "dns-blocked": Fault(does(), no_dns, when=When.BEFORE, lasts_seconds=20),
    "name-taken": Fault(does(), foreign_service, when=When.BEFORE, spares_others=True),
}
