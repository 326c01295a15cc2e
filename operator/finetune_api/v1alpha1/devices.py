"""Counts the compute devices of a node from its resource limits, because each rank uses one device (decisions/218)."""

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

from finetune_api.v1alpha1.quantity import parse_quantity

DEVICE_TABLE_VERSION = 1  # recorded when a job begins; version 0 counts only GPUs, as releases without the table did
Limits = Mapping[str, str | int]
_GPUS = "*/gpu"  # nvidia.com, amd.com and every other vendor
# resources of which each unit is the device of one rank
_DEVICES = (
    _GPUS,
    "nvidia.com/gpu.shared",  # time slices of GPUs
    "nvidia.com/mig-*",
    "gpu.intel.com/i915",
    "gpu.intel.com/xe",
    "habana.ai/gaudi",
    "huawei.com/Ascend*",
    "aws.amazon.com/neuroncore",
    "cambricon.com/mlu",
)
# resources that are not compute devices: network adapters, device files, and shares of a device with another name
_OTHER_RESOURCES = (
    "rdma/*",
    "*/rdma*",
    "*/hostdev*",
    "*/*sriov*",
    "*/efa",
    "openshift.io/*",
    "mellanox.com/*",
    "networking.gke.io.networks/*",
    "smarter-devices/*",
    "devices.kubevirt.io/*",
    "squat.ai/*",
    "github.com/fuse",
    "nvidia.com/gpumem*",
    "nvidia.com/gpucores",
    "huawei.com/*-memory",
    "huawei.com/*-core",
)
_KUBERNETES_DOMAIN = "kubernetes.io"
_DEVICE_CLASS_DOMAIN = "deviceclass.resource.kubernetes.io"  # dynamic resource allocation by an extended resource


def count_devices(limits: Limits) -> int:
    """Return the number of compute devices in the limits of a node.

    Raises: ValueError if the count of a device is not a quantity.
    """
    return sum(int(parse_quantity(count)) for name, count in limits.items() if _is_device(name))


def find_uncountable_resource(limits: Limits) -> str | None:
    """Return an extended resource that may be a compute device of an unknown kind; None if a known one is requested."""
    requested = [name for name, count in limits.items() if parse_quantity(count)]
    if any(_is_device(name) for name in requested):
        return None
    return next((name for name in requested if _is_extended(name) and not _matches(name, _OTHER_RESOURCES)), None)


def keep_rank_count(job: dict[str, Any]) -> dict[str, Any]:
    """Return the raw job with an explicit `nprocPerNode` if it began before this table and would now get another count.

    Such a job, which may also request a resource of an unknown kind, has one rank per GPU, or one.
    """
    spec, status = job.get("spec"), job.get("status")
    if not isinstance(spec, dict) or not isinstance(status, dict) or spec.get("nprocPerNode") is not None:
        return job
    snapshot, resources = status.get("snapshot"), spec.get("resources")
    has_table = isinstance(snapshot, dict) and snapshot.get("deviceTable")
    limits = resources.get("limits") if isinstance(resources, dict) else None
    if not status.get("attempts") or has_table or not isinstance(limits, dict):
        return job
    if not any(_is_extended(name) and not fnmatchcase(name, _GPUS) for name in limits):
        return job
    counts = [str(count) for name, count in limits.items() if fnmatchcase(name, _GPUS)]
    ranks = sum(int(count) for count in counts if count.isascii() and count.isdigit())
    return {**job, "spec": {**spec, "nprocPerNode": max(1, ranks)}}


def _is_device(name: str) -> bool:
    return _matches(name, _DEVICES) and not _matches(name, _OTHER_RESOURCES)


def _is_extended(name: str) -> bool:
    """Return whether the resource is not one of Kubernetes itself, such as cpu or hugepages-2Mi."""
    domain, slash, _ = name.partition("/")
    is_native = domain == _KUBERNETES_DOMAIN or domain.endswith("." + _KUBERNETES_DOMAIN)
    return bool(slash) and (not is_native or domain == _DEVICE_CLASS_DOMAIN)


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)
