"""Checks whether a cluster and the rights of a user suffice for jobs."""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import StrEnum

from finetune_api.v1alpha1.devices import count_devices
from finetune_api.v1alpha1.job import GROUP, KIND, PLURAL
from finetune_client.connection import ClusterConnection
from finetune_client.dns_label import check_dns_label
from finetune_client.errors import ClientError
from finetune_operator import names
from finetune_operator.kube.api_paths import VERSION_PATH, build_path, collection_path
from finetune_operator.observation.ownership import RawBody

OPERATOR_NAMESPACE = "finetune-system"  # of the documented installation
OPERATOR_SELECTOR = f"app.kubernetes.io/name={names.MANAGER}"
IMAGE_VARIABLE = "FINETUNE_TRAINER_IMAGE"
ANOTHER_NAMESPACE = "--operator-namespace names another one"
SHARED = "ReadWriteMany"


class CheckOutcome(StrEnum):
    """Outcome of a check; an unknown one could not be determined, usually for lack of a right."""

    OK = "ok"
    WARNING = "warning"
    FAILED = "failed"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class ClusterCheck:
    """Outcome of one check, with what was found and what to do."""

    title: str
    outcome: CheckOutcome
    message: str


@dataclass(frozen=True)
class LeadingPod:
    """Pod of the operator that holds a Lease. trainer_image: image of jobs without spec.image; "" if it has none."""

    name: str
    version: str
    is_ready: bool
    trainer_image: str


@dataclass(frozen=True)
class Permission:
    """A right of the user in the namespace, and the commands that need it."""

    verb: str
    group: str
    resource: str
    commands: str
    subresource: str = ""
    is_required: bool = False


PERMISSIONS = (
    Permission("list", GROUP, PLURAL, "list, status, why, wait", is_required=True),
    Permission("create", GROUP, PLURAL, "submit", is_required=True),
    Permission("patch", GROUP, PLURAL, "submit, suspend, resume, cancel", is_required=True),
    Permission("delete", GROUP, PLURAL, "delete"),
    Permission("get", "", "pods", "logs", subresource="log"),
    Permission("list", "events.k8s.io", "events", "events"),
    Permission("get", "", "pods", "top", subresource="proxy"),
    Permission("create", "", "pods", "cp, report, logs --saved, doctor FILE"),
    Permission("create", "", "services", "doctor FILE"),
    Permission("create", "", "pods", "cp, report, logs --saved, exec", subresource="exec"),
)


async def examine_cluster(connection: ClusterConnection, operator_namespace: str) -> tuple[ClusterCheck, ...]:
    """Run all checks at once; each becomes a result, also if it cannot be carried out."""
    checks: dict[str, Callable[[ClusterConnection], Awaitable[ClusterCheck]]] = {
        "cluster": _check_server,
        "custom resource": _check_custom_resource,
        "operator": lambda connection: _check_operator(connection, operator_namespace),
        "rights": _check_rights,
        "storage": _check_storage,
        "devices": _check_devices,
    }
    return tuple(await asyncio.gather(*(_run(connection, title, check) for title, check in checks.items())))


async def _run(
    connection: ClusterConnection, title: str, check: Callable[[ClusterConnection], Awaitable[ClusterCheck]]
) -> ClusterCheck:
    try:
        return await check(connection)
    except ClientError as error:
        outcome = CheckOutcome.UNKNOWN if error.status in (401, 403) else CheckOutcome.FAILED
        return ClusterCheck(title, outcome, str(error))


async def _check_server(connection: ClusterConnection) -> ClusterCheck:
    version = await connection.get(VERSION_PATH, what="API server")
    found = f"Kubernetes {version.get('gitVersion')} at {connection.credentials.server}"
    return ClusterCheck("cluster", CheckOutcome.OK, f"{found}, namespace {connection.namespace}")


async def _check_custom_resource(connection: ClusterConnection) -> ClusterCheck:
    try:
        await connection.get(build_path(names.API_VERSION), what=names.API_VERSION)
    except ClientError as error:
        if error.status != 404:
            raise
        message = f"{KIND} ({names.API_VERSION}) is not installed; install the Helm chart of finetune-operator"
        return ClusterCheck("custom resource", CheckOutcome.FAILED, message)
    return ClusterCheck("custom resource", CheckOutcome.OK, f"{KIND} {names.API_VERSION} is installed")


async def _check_operator(connection: ClusterConnection, namespace: str) -> ClusterCheck:
    pods = await _find_leading_pods(connection, namespace)
    outcome = CheckOutcome.OK if all(pod.is_ready for pod in pods) else CheckOutcome.FAILED
    lines = (
        f"{namespace}/{pod.name} {pod.version} leads and is {'ready' if pod.is_ready else 'not ready; read its log'}"
        for pod in pods
    )
    return ClusterCheck("operator", outcome, "; ".join(lines))


async def read_default_image(connection: ClusterConnection, operator_namespace: str) -> str:
    """Return the image that the operator uses for jobs without spec.image.

    Raises:
        ClientError: The user may not read the operator's pod, or there is none, or several have different images.
    """
    try:
        pods = await _find_leading_pods(connection, operator_namespace)
    except ClientError as error:
        message = f"spec.image: is not set, and the operator's default is unknown: {error}; set spec.image"
        raise ClientError(message, status=error.status) from error
    images = sorted({pod.trainer_image for pod in pods})
    if len(images) != 1 or not images[0]:
        raise ClientError(
            f"spec.image: is not set, and the operator's default is {' or '.join(images) or 'none'}; set it"
        )
    return images[0]


async def _find_leading_pods(connection: ClusterConnection, namespace: str) -> tuple[LeadingPod, ...]:
    """Return the pods of the operator that hold a Lease in its namespace, usually one.

    Objects of other namespaces are not read, because everybody may give them the labels and names of the operator.

    Raises:
        ClientError: No pod holds a Lease, or the user may not read Leases and pods there.
    """
    check_dns_label(namespace, what="operator namespace")
    try:
        leases = await connection.list_items(collection_path("Lease", namespace), what=f"leases of {namespace}")
        path = collection_path("Pod", namespace)
        pods = await connection.list_items(path, what=f"pods of {namespace}", selector=OPERATOR_SELECTOR)
    except ClientError as error:
        raise ClientError(f"{error} ({ANOTHER_NAMESPACE})", status=error.status) from error
    holders = {((lease.get("spec") or {}).get("holderIdentity") or "").partition("_")[0] for lease in leases}
    # A Lease contains the hostname of its holder, which is the name of the pod without what exceeds 63 characters.
    leading = tuple(_parse_pod(pod) for pod in pods if pod["metadata"]["name"][:63].rstrip("-.") in holders)
    if not leading:
        found = f"{len(pods)} pods of {names.MANAGER}, none of which holds a Lease"
        raise ClientError(f"namespace {namespace}: found {found}; start the operator there ({ANOTHER_NAMESPACE})")
    return leading


def _parse_pod(pod: RawBody) -> LeadingPod:
    metadata, conditions = pod["metadata"], (pod.get("status") or {}).get("conditions") or ()
    variables = {each["name"]: each for container in pod["spec"]["containers"] for each in container.get("env") or ()}
    return LeadingPod(
        name=metadata["name"],
        version=(metadata.get("labels") or {}).get("app.kubernetes.io/version", "unknown version"),
        is_ready=any(each.get("type") == "Ready" and each.get("status") == "True" for each in conditions),
        trainer_image=variables.get(IMAGE_VARIABLE, {}).get("value") or "",
    )


async def _check_rights(connection: ClusterConnection) -> ClusterCheck:
    allowed = await asyncio.gather(*(_is_allowed(connection, permission) for permission in PERMISSIONS))
    missing = [permission for permission, is_allowed in zip(PERMISSIONS, allowed, strict=True) if not is_allowed]
    if not missing:
        return ClusterCheck("rights", CheckOutcome.OK, "all commands are allowed")
    lines = [f"{_describe(permission)} (for {permission.commands})" for permission in missing]
    outcome = CheckOutcome.FAILED if any(permission.is_required for permission in missing) else CheckOutcome.WARNING
    return ClusterCheck("rights", outcome, f"missing: {'; '.join(lines)}")


async def _is_allowed(connection: ClusterConnection, permission: Permission) -> bool:
    attributes = {
        "namespace": connection.namespace,
        "verb": permission.verb,
        "group": permission.group,
        "resource": permission.resource,
        "subresource": permission.subresource,
    }
    body = {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SelfSubjectAccessReview",
        "spec": {"resourceAttributes": attributes},
    }
    path = collection_path("SelfSubjectAccessReview", None)
    review = await connection.create(path, body, what="review of the rights")
    return bool((review.get("status") or {}).get("allowed"))


def _describe(permission: Permission) -> str:
    subresource = f"/{permission.subresource}" if permission.subresource else ""
    return f"{permission.verb} {permission.resource}{subresource}"


async def _check_storage(connection: ClusterConnection) -> ClusterCheck:
    path = collection_path("PersistentVolumeClaim", connection.namespace)
    claims = await connection.list_items(path, what=f"persistentvolumeclaims of namespace {connection.namespace}")
    if not claims:
        message = f"namespace {connection.namespace} has no PersistentVolumeClaim; spec.output needs one"
        return ClusterCheck("storage", CheckOutcome.WARNING, message)
    described = []
    for claim in claims:
        modes, phase = claim["spec"].get("accessModes") or (), (claim.get("status") or {}).get("phase")
        described.append(f"{claim['metadata']['name']} ({phase}, {', '.join(modes)})")
    if not any(SHARED in (claim["spec"].get("accessModes") or ()) for claim in claims):
        message = f"no claim is {SHARED}, as jobs on several nodes need it: {', '.join(described)}"
        return ClusterCheck("storage", CheckOutcome.WARNING, message)
    return ClusterCheck("storage", CheckOutcome.OK, ", ".join(described))


async def _check_devices(connection: ClusterConnection) -> ClusterCheck:
    nodes = await connection.list_items(collection_path("Node", None), what="nodes")
    devices: Counter[str] = Counter()
    for node in nodes:
        for resource, amount in ((node.get("status") or {}).get("allocatable") or {}).items():
            if "/" in resource and (count := count_devices({resource: amount})):
                devices[resource] += count
    if not devices:
        message = f"none of {len(nodes)} Kubernetes nodes has a GPU; jobs train on CPUs"
        return ClusterCheck("devices", CheckOutcome.WARNING, message)
    total = ", ".join(f"{count} {resource}" for resource, count in sorted(devices.items()))
    return ClusterCheck("devices", CheckOutcome.OK, f"{total} on {len(nodes)} Kubernetes nodes")
