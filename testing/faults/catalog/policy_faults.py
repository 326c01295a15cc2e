"""Faults of admission control and permissions: slow or denying webhooks, policies, pod security, missing RBAC."""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from finetune_operator import names
from testing.fakes.admission_webhook import serve_admission_webhook
from testing.faults.catalog.fault import InjectedFault, build_start_fault
from testing.faults.job_under_test import JobUnderTest, RawBody
from testing.faults.kwok_job import ON_KWOK, RANK_KILLED, build_termination, create_namespace, run_kwok_job
from testing.processes.waiting import wait_until

POD_RULE = {"operations": ["CREATE"], "apiGroups": [""], "apiVersions": ["v1"], "resources": ["pods"]}
ADMISSION = "admissionregistration.k8s.io/v1"
WEBHOOK_TIMEOUT_SECONDS = 15
MISSING_SERVICE = {"service": {"name": "policy", "namespace": "default"}}
POD_SECURITY = "pod-security.kubernetes.io/enforce"


@contextmanager
def apply_webhook(job: JobUnderTest, client_config: RawBody, *, selector: RawBody | None = None) -> Iterator[None]:
    """Register an admission webhook for the pods of the job, or for those that the selector matches."""
    hook = {
        "name": "policy.example.com",
        "rules": [POD_RULE],
        **(selector or {"objectSelector": {"matchLabels": {names.JOB_NAME: job.name}}}),
        "clientConfig": client_config,
        "admissionReviewVersions": ["v1"],
        "sideEffects": "None",
        "failurePolicy": "Fail",
        "timeoutSeconds": WEBHOOK_TIMEOUT_SECONDS,
    }
    kind, metadata = "ValidatingWebhookConfiguration", {"name": job.name}
    job.installation.apply({"apiVersion": ADMISSION, "kind": kind, "metadata": metadata, "webhooks": [hook]})
    try:
        time.sleep(2)  # the API server loads webhooks asynchronously
        yield
    finally:
        job.installation.kubectl("delete", kind, job.name)


@contextmanager
def register_webhook(
    job: JobUnderTest, *, allowed: bool, delay_seconds: float = 0.0, selector: RawBody | None = None
) -> Iterator[None]:
    """Register an admission webhook that this process serves with the API server's own certificate."""
    layout = job.cluster.layout
    certificate, key = layout.pki / "apiserver.crt", layout.pki / "apiserver.key"
    authority = base64.b64encode((layout.pki / "ca.crt").read_bytes()).decode()
    with (
        serve_admission_webhook(
            str(layout.host_address), certificate, key, allowed=allowed, delay_seconds=delay_seconds
        ) as url,
        apply_webhook(job, {"url": url, "caBundle": authority}, selector=selector),
    ):
        yield


@contextmanager
def deny_by_policy(job: JobUnderTest) -> Iterator[None]:
    """Deny the pods of the job by a ValidatingAdmissionPolicy, and kill PID 1 of node 1."""
    selector = {"matchLabels": {names.JOB_NAME: job.name}}
    spec = {
        "failurePolicy": "Fail",
        "matchConstraints": {"resourceRules": [POD_RULE], "objectSelector": selector},
        "validations": [{"expression": "false", "message": "denied by the fault matrix"}],
    }
    kinds, metadata = ("ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding"), {"name": job.name}
    binding = {"policyName": job.name, "validationActions": ["Deny"]}
    job.installation.apply(
        {"apiVersion": ADMISSION, "kind": kinds[0], "metadata": metadata, "spec": spec},
        {"apiVersion": ADMISSION, "kind": kinds[1], "metadata": metadata, "spec": binding},
    )
    try:
        wait_until_pods_are_denied(job)
        job.kill_container(1)
        job.wait_until(lambda recorder: bool(recorder.status.get("waiting")), goal="waiting", timeout_seconds=60)
    finally:
        for kind in reversed(kinds):
            job.installation.kubectl("delete", kind, job.name)
    yield


def wait_until_pods_are_denied(job: JobUnderTest) -> None:
    """Wait for the policy, which the API server loads asynchronously."""
    dry_run = ("run", "probe", "--image=none", f"--labels={names.JOB_NAME}={job.name}", "--dry-run=server")
    wait_until(
        lambda: not job.cluster.kubectl.succeeds("--namespace", "default", *dry_run), goal="the policy is enforced"
    )


@contextmanager
def raise_pod_security(job: JobUnderTest) -> Iterator[None]:
    """Raise the pod security level of another namespace before a restart of its job, and lower it after 8 s."""
    namespace = f"{job.name}-level"

    def set_level(level: str) -> None:
        job.cluster.kubectl("label", "namespace", namespace, f"{POD_SECURITY}={level}", "--overwrite")

    template = {**ON_KWOK, "containerSecurityContext": {}}  # violates the level restricted
    with (
        create_namespace(job, namespace, **{POD_SECURITY: "baseline"}),
        run_kwok_job(job, num_nodes=2, namespace=namespace, podTemplate=template) as other,
    ):
        other.wait_until_running(attempt=0, timeout_seconds=60)
        set_level("restricted")
        time.sleep(1)
        other.end_nodes(lambda _rank: build_termination(exit_code=1, **RANK_KILLED), node_ranks=range(1))
        other.wait_until(lambda status: bool(status.get("waiting")), goal="waiting", timeout_seconds=60)
        time.sleep(8)
        job.values["pending reason of the other job"] = (other.read_status().get("waiting") or {}).get("reason", "none")
        set_level("baseline")
        job.values["next attempt of the other job runs after, s"] = other.wait_until_running(
            attempt=1, timeout_seconds=120
        )
    yield


@contextmanager
def revoke_permissions(job: JobUnderTest) -> Iterator[None]:
    """Delete the ClusterRoleBinding of the operator, and kill PID 1 of node 1."""
    kind, name = "clusterrolebinding", "finetune-operator"
    binding = json.loads(job.installation.kubectl("get", kind, name, "-o", "json"))
    binding["metadata"] = {key: binding["metadata"][key] for key in ("name", "labels", "annotations")}
    job.installation.kubectl("delete", kind, name)
    try:
        job.kill_container(1)
        yield
    finally:
        job.installation.kubectl("create", "-f", "-", stdin=json.dumps(binding))


POLICY_FAULTS = {
    "webhook-down": build_start_fault(
        partial(apply_webhook, client_config=MISSING_SERVICE), duration_seconds=8, is_isolated=True
    ),
    "denied-without-code": build_start_fault(
        partial(register_webhook, allowed=False), duration_seconds=10, is_isolated=True
    ),
    "policy-denied": InjectedFault(deny_by_policy, is_isolated=True),
    "pod-security-raised": InjectedFault(raise_pod_security, is_isolated=True),
    "rbac-revoked": InjectedFault(revoke_permissions, duration_seconds=15),
}
