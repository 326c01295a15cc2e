"""Faults of upgrades and edits: a newer CRD, another default image, changes of finished, deleted or unobserved jobs."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager

from finetune_operator import names
from testing.faults.catalog.fault import InjectedFault, make_program_fields
from testing.faults.catalog.pod_faults import recreate_job
from testing.faults.catalog.rank_faults import kill_rank
from testing.faults.job_under_test import JobUnderTest, RawBody, wait_until_settled
from testing.faults.kwok_job import build_command_job
from testing.processes.cluster_training import build_training_fields
from testing.processes.operator_stack import CHART, OPERATOR_NAMESPACE
from testing.processes.waiting import wait_until

CRD = "crd/finetunejobs.finetune.dev"
DEPLOYMENT = "deployment/finetune-operator"
OTHER_IMAGE = "localhost/chaos/none:v2"
EDITED = {"example.com/edited": "yes"}


def restart_operator(job: JobUnderTest) -> None:
    """Replace all replicas, so that they list all objects again."""
    pods = [pod["metadata"]["name"] for pod in job.list_operator_pods()]
    job.installation.kubectl("delete", "pod", "-n", OPERATOR_NAMESPACE, *pods)
    wait_until_settled(job.installation, job.cluster)


@contextmanager
def set_unknown_field(job: JobUnderTest) -> Iterator[None]:
    """Install a CRD with the field spec.note, set the field, restart the replicas and kill PID 1 of node 1."""
    older = json.loads(job.installation.kubectl("get", CRD, "-o", "json"))
    apply_crd(job, add_spec_field(older, "note"))
    try:
        note = set_note(job)
        restart_operator(job)
        job.values["field in the stored object"] = note
        job.kill_container(1)
        yield
    finally:
        apply_crd(job, older)


def add_spec_field(crd: RawBody, name: str) -> RawBody:
    """Return the CRD with another field of type string in the spec of jobs."""
    newer: RawBody = json.loads(json.dumps(crd))
    for version in newer["spec"]["versions"]:
        version["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"][name] = {"type": "string"}
    return newer


def apply_crd(job: JobUnderTest, crd: RawBody) -> None:
    """Apply the CRD in the name of Helm, so that a later upgrade of the chart causes no conflict."""
    metadata = {key: crd["metadata"][key] for key in ("name", "labels", "annotations")}
    body = {"apiVersion": crd["apiVersion"], "kind": crd["kind"], "metadata": metadata, "spec": crd["spec"]}
    options = ("--server-side", "--field-manager=helm", "--force-conflicts")
    job.installation.kubectl("apply", *options, "-f", "-", stdin=json.dumps(body))


def set_note(job: JobUnderTest) -> str:
    """Set spec.note as soon as the API server knows the field, and return the stored value."""
    deadline = time.monotonic() + 30
    while True:
        job.patch({"spec": {"note": "set by a user"}})
        note = str(job.installation.get_job(job.name)["spec"].get("note", ""))
        if note or time.monotonic() > deadline:
            return note
        time.sleep(0.5)


@contextmanager
def upgrade_default_image(job: JobUnderTest) -> Iterator[None]:
    """Stop a rank, set another default trainer image by Helm, wait for the rollout and kill the rank."""
    # without this, the training may end during the rollout
    job.chaos.kill_rank(job.installation.namespace, job.get_pod_name(1), rank=3, signal_number=signal.SIGSTOP)
    options = ("--namespace", OPERATOR_NAMESPACE, "--wait", "--timeout", "120s", "--reuse-values")
    job.installation.helm(
        "upgrade", "finetune-operator", str(CHART), *options, "--set-string", f"trainerImage={OTHER_IMAGE}"
    )
    try:
        wait_until_settled(job.installation, job.cluster)
        arguments = json.dumps(job.find_leader()["spec"]["containers"][0])
        job.values["default image after the upgrade"] = OTHER_IMAGE if OTHER_IMAGE in arguments else "unchanged"
        with kill_rank(job):
            yield
    finally:
        job.installation.install_operator()


@contextmanager
def patch_finished_job(job: JobUnderTest) -> Iterator[None]:
    name = f"{job.name}-done"
    job.installation.apply(build_command_job(name, numNodes=1))
    try:
        job.installation.wait_until_finished(name)
        patch = json.dumps({"spec": {"ttlSecondsAfterFinished": 3600, "restartPolicy": {"maxRestarts": 7}}})
        job.installation.kubectl("patch", "ftj", name, "--type=merge", "-p", patch)
        started_at = time.monotonic()
        job.installation.kubectl("wait", "--for=condition=Complete", f"ftj/{name}", "--timeout=60s")
        job.values["kubectl wait returns after, s"] = round(time.monotonic() - started_at, 1)
    finally:
        job.installation.delete(name)
    yield


@contextmanager
def recreate_job_in_second_attempt(job: JobUnderTest) -> Iterator[None]:
    job.kill_container(1)
    job.wait_until(
        lambda recorder: recorder.steps[-1].attempt == 1 and recorder.steps[-1].step >= 25,
        goal="training in attempt 1",
        timeout_seconds=60,
    )
    with recreate_job(job):
        yield


@contextmanager
def stop_operator(job: JobUnderTest) -> Iterator[None]:
    """Scale the operator to zero, and back on exit."""
    scale = ("scale", "--namespace", OPERATOR_NAMESPACE, DEPLOYMENT)
    job.installation.kubectl(*scale, "--replicas=0")
    list_pods = ("get", "pods", "-n", OPERATOR_NAMESPACE, "-o", "name")
    wait_until(lambda: not job.installation.kubectl(*list_pods).strip(), goal="no replica of the operator runs")
    try:
        yield
    finally:
        job.installation.kubectl(*scale, "--replicas=2")
        wait_until_settled(job.installation, job.cluster)


@contextmanager
def edit_job_without_operator(job: JobUnderTest) -> Iterator[None]:
    """Suspend, edit and resume the job while no replica runs, and wait for the pods of the next attempt."""
    with stop_operator(job):
        job.patch({"spec": {"suspend": True}})
        job.patch({"spec": {"podTemplate": {"annotations": EDITED}}})
        job.patch({"spec": {"suspend": False}})
    job.wait_until(
        lambda recorder: bool(recorder.steps) and recorder.steps[-1].attempt == 1,
        goal="training in attempt 1",
        timeout_seconds=120,
    )
    pods = job.installation.list_pods(job.name)
    job.values["pods of the next attempt with the new podTemplate"] = sum(
        pod["metadata"]["labels"][names.ATTEMPT] == "1" and EDITED.items() <= pod["metadata"]["annotations"].items()
        for pod in pods
    )
    yield


RELEASE_FAULTS = {
    "unknown-field": InjectedFault(set_unknown_field),
    "operator-upgraded": InjectedFault(
        upgrade_default_image,
        lambda _: {"training": build_training_fields(max_steps=60, save_steps=20)},
        injection_step=22,
    ),
    "finished-job-patched": InjectedFault(patch_finished_job, is_isolated=True),
    "applied-again-later": InjectedFault(
        recreate_job_in_second_attempt, make_program_fields("--save-seconds", "5"), is_isolated=True
    ),
    "edited-while-operator-away": InjectedFault(edit_job_without_operator),
}
