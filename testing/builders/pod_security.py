"""Kubernetes' Pod Security Standards, level restricted, as far as the fields go that a job's pods can have."""

from collections.abc import Iterator
from typing import Any

Raw = dict[str, Any]

HOST_NAMESPACES = ("hostNetwork", "hostPID", "hostIPC")
VOLUME_KINDS = frozenset(
    {"configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim", "projected", "secret"}
)


def restricted_violations(pod: Raw) -> tuple[str, ...]:
    """What the restricted level would refuse the pod for."""
    spec: Raw = pod["spec"]
    found = [f"{field} is set" for field in HOST_NAMESPACES if spec.get(field)]
    for volume in spec.get("volumes", ()):
        found += [f"volume {volume['name']}: {kind}" for kind in volume if kind not in ("name", *VOLUME_KINDS)]
    for container in (*spec.get("initContainers", ()), *spec["containers"]):
        found += _container_violations(spec.get("securityContext", {}), container)
    return tuple(found)


def _container_violations(of_pod: Raw, container: Raw) -> Iterator[str]:
    own: Raw = container.get("securityContext", {})
    both = {**of_pod, **own}
    if any(port.get("hostPort") for port in container.get("ports", ())):
        yield "hostPort is set"
    if own.get("privileged"):
        yield "privileged is true"
    if own.get("allowPrivilegeEscalation") is not False:
        yield "allowPrivilegeEscalation is not false"
    if "ALL" not in own.get("capabilities", {}).get("drop", ()):
        yield "capabilities.drop lacks ALL"
    if set(own.get("capabilities", {}).get("add", ())) - {"NET_BIND_SERVICE"}:
        yield "capabilities.add"
    if both.get("runAsNonRoot") is not True:
        yield "runAsNonRoot is not true"
    if both.get("runAsUser") == 0:
        yield "runAsUser is 0"
    if both.get("seccompProfile", {}).get("type") not in ("RuntimeDefault", "Localhost"):
        yield "seccompProfile is not RuntimeDefault"
