"""The pod through which the output of a job is read: a running one of the job, or one created for that purpose."""

import asyncio
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from finetune_api.v1alpha1.job import KIND
from finetune_client.connection import ClusterConnection
from finetune_client.errors import ClientError
from finetune_client.job import Job
from finetune_client.temporary_object import find_wait, open_temporary_object
from finetune_operator import names
from finetune_operator.kube.api_paths import ApiPath, InvalidName, object_path
from finetune_operator.observation.ownership import RawBody
from finetune_operator.plan.pod_manifest import RESTRICTED_CONTAINER, RESTRICTED_POD

LIFETIME_SECONDS = 3600  # an abandoned pod ends by itself
START_TIMEOUT_SECONDS = 180
POLL_SECONDS = 1.0
RESOURCES = {"requests": {"cpu": "100m", "memory": "64Mi"}, "limits": {"cpu": "1", "memory": "256Mi"}}


@dataclass(frozen=True)
class OutputPod:
    """A running pod with the output claim, and the folder of the job in it."""

    name: str
    folder: str


@asynccontextmanager
async def open_output_pod(connection: ClusterConnection, job: Job) -> AsyncIterator[OutputPod]:
    """Yield a pod that can read the output of a job. A pod that is created for it is deleted at the end.

    Raises:
        ClientError: The job has no output, or no pod can be started.
    """
    output = job.spec.output
    if output is None:
        raise ClientError(f"{job.name} has no spec.output; its only output is the log of its pods")
    folder = f"{names.OUTPUT_DIR}/{output.sub_path or f'{job.namespace}/{job.name}'}"
    running_pod = await _find_running_pod(connection, job)
    if running_pod is not None:
        yield OutputPod(running_pod, folder)
        return
    manifest = build_reader_pod(job, suffix=secrets.token_hex(3))
    name = manifest["metadata"]["name"]
    what = f"pod {job.namespace}/{name}, which reads the output"
    async with open_temporary_object(connection, manifest, what=what):
        await _wait_until_running(connection, object_path("Pod", job.namespace, name), what)
        yield OutputPod(name, folder)


def build_reader_pod(job: Job, *, suffix: str) -> RawBody:
    """Return a restricted pod that mounts the output claim read-only and does nothing.

    It uses the image of the job, which the Kubernetes nodes have already pulled, and the placement of its pods.
    """
    spec, snapshot = job.spec, job.status.snapshot
    template = spec.pod_template
    if snapshot is None or spec.output is None:
        raise ClientError(f"{job.name}: no attempt has started, so there is no output")
    owner = {"apiVersion": names.API_VERSION, "kind": KIND, "name": job.name, "uid": job.metadata.uid}
    claim = {"claimName": spec.output.persistent_volume_claim.claim_name, "readOnly": True}
    placement: dict[str, Any] = {
        "nodeSelector": dict(template.node_selector),
        "affinity": template.affinity,
        "tolerations": [each.model_dump(by_alias=True, exclude_none=True) for each in template.tolerations],
        "imagePullSecrets": [{"name": secret.name} for secret in spec.image_pull_secrets],
    }
    container = {
        "name": names.CONTAINER,
        "image": snapshot.image_digest or snapshot.image,
        "command": ["sleep", str(LIFETIME_SECONDS)],
        "resources": RESOURCES,
        "securityContext": RESTRICTED_CONTAINER | {"readOnlyRootFilesystem": True},
        "volumeMounts": [{"name": "output", "mountPath": names.OUTPUT_DIR, "readOnly": True}],
        **({"imagePullPolicy": spec.image_pull_policy} if spec.image_pull_policy else {}),
    }
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": f"{job.name}-output-{suffix}",
            "labels": {"app.kubernetes.io/component": "output-reader", "app.kubernetes.io/instance": job.name},
            "ownerReferences": [owner],
        },
        "spec": {
            "restartPolicy": "Never",
            "activeDeadlineSeconds": LIFETIME_SECONDS,
            "terminationGracePeriodSeconds": 0,
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "securityContext": RESTRICTED_POD if template.security_context is None else template.security_context,
            **{key: value for key, value in placement.items() if value},
            "containers": [container],
            "volumes": [{"name": "output", "persistentVolumeClaim": claim}],
        },
    }


async def _find_running_pod(connection: ClusterConnection, job: Job) -> str | None:
    """Return the name of a running pod of the current attempt."""
    if job.status.attempt is None or job.is_finished:
        return None
    for node in job.status.nodes or ():
        if node.phase == "Running":
            try:
                path = object_path("Pod", job.namespace, node.pod_name)
                pod = await connection.get(path, what=f"pod {node.pod_name}")
            except (ClientError, InvalidName):
                continue
            if (pod.get("status") or {}).get("phase") == "Running":
                return node.pod_name
    return None


async def _wait_until_running(connection: ClusterConnection, path: ApiPath, what: str) -> None:
    status: RawBody = {}
    try:
        async with asyncio.timeout(START_TIMEOUT_SECONDS):
            while status.get("phase") != "Running":
                status = (await connection.get(path, what=what)).get("status") or {}
                wait, is_permanent = find_wait(status)
                if is_permanent or status.get("phase") == "Succeeded":
                    raise ClientError(f"{what}: {wait or 'it has ended'}")
                await asyncio.sleep(POLL_SECONDS)
    except TimeoutError:
        raise ClientError(f"{what}: not running after {START_TIMEOUT_SECONDS} s: {find_wait(status)[0]}") from None
