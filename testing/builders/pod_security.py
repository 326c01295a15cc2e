"""Check of pods against the restricted profile of the Kubernetes Pod Security Standards.

The check covers only fields that pods of a job can have.
"""

from collections.abc import Iterator
from typing import Any

RawBody = dict[str, Any]

HOST_NAMESPACES = ("hostNetwork", "hostPID", "hostIPC")
VOLUME_KINDS = frozenset(
    {
        "configMap",
        "csi",
        "downwardAPI",
        "emptyDir",
        "ephemeral",
        "image",
        "persistentVolumeClaim",
        "projected",
        "secret",
    }
)


def find_restricted_violations(pod: RawBody) -> tuple[str, ...]:
    """Return a message for each violation of the restricted profile."""
    spec: RawBody = pod["spec"]
    violations = [f"{field} is set" for field in HOST_NAMESPACES if spec.get(field)]
    for volume in spec.get("volumes", ()):
        violations += [f"volume {volume['name']}: {kind}" for kind in volume if kind not in ("name", *VOLUME_KINDS)]
    for container in (*spec.get("initContainers", ()), *spec["containers"]):
        violations += _find_container_violations(spec.get("securityContext", {}), container)
    return tuple(violations)


def _find_container_violations(pod_context: RawBody, container: RawBody) -> Iterator[str]:
    context: RawBody = container.get("securityContext", {})
    merged_context = {**pod_context, **context}
    if any(port.get("hostPort") for port in container.get("ports", ())):
        yield "hostPort is set"
    if context.get("privileged"):
        yield "privileged is true"
    if context.get("allowPrivilegeEscalation") is not False:
        yield "allowPrivilegeEscalation is not false"
    if "ALL" not in context.get("capabilities", {}).get("drop", ()):
        yield "capabilities.drop lacks ALL"
    if set(context.get("capabilities", {}).get("add", ())) - {"NET_BIND_SERVICE"}:
        yield "capabilities.add"
    if merged_context.get("runAsNonRoot") is not True:
        yield "runAsNonRoot is not true"
    if merged_context.get("runAsUser") == 0:
        yield "runAsUser is 0"
    if merged_context.get("seccompProfile", {}).get("type") not in ("RuntimeDefault", "Localhost"):
        yield "seccompProfile is not RuntimeDefault"
