"""Table of the compute devices of a node: which resources they are, and how the ranks of a node use them.

Each rank uses one device (decisions/218). v1alpha1.device_rules rejects jobs that could not use their devices.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from fnmatch import fnmatchcase

from finetune_api.v1alpha1.quantity import parse_quantity

DEVICE_TABLE_VERSION = 2  # recorded when a job begins, for releases with another table
Limits = Mapping[str, str | int]


class Support(StrEnum):
    """Which programs can use a kind of device."""

    TRAINER = "the operator's trainer"
    TRAINER_IMAGE = "the operator's trainer in an image with torch for the device"
    COMMAND = "a command"
    NONE = "nothing"


@dataclass(frozen=True)
class DeviceKind:
    """A kind of device that each unit of a resource stands for."""

    resource: str  # name or pattern
    name: str
    backend: str  # process group backend of torch for this device
    support: Support = Support.COMMAND
    max_ranks_reason: str = ""  # why ranks of one node cannot use several of these devices; empty: they can


# the first kind that matches a resource applies
DEVICE_KINDS = (
    DeviceKind("nvidia.com/gpu", "NVIDIA GPU", "nccl", Support.TRAINER),
    DeviceKind(
        "nvidia.com/gpu.shared",
        "time slice of an NVIDIA GPU",
        "nccl",
        Support.TRAINER,
        "several time slices may belong to one GPU, which NCCL accepts for one rank only",
    ),
    DeviceKind(
        "nvidia.com/mig-*",
        "MIG slice of an NVIDIA GPU",
        "nccl",
        Support.TRAINER,
        "CUDA shows one MIG slice to a process, so all ranks of a node would use the same one",
    ),
    DeviceKind("amd.com/gpu", "AMD GPU", "nccl", Support.TRAINER_IMAGE),  # torch for ROCm calls RCCL nccl
    DeviceKind("gpu.intel.com/i915", "Intel GPU", "xccl"),
    DeviceKind("gpu.intel.com/xe", "Intel GPU", "xccl"),
    DeviceKind("habana.ai/gaudi", "Intel Gaudi", "hccl"),
    DeviceKind("huawei.com/Ascend*", "Huawei Ascend NPU", "hccl"),
    DeviceKind("aws.amazon.com/neuroncore", "AWS Neuron core", "xla"),
    DeviceKind("cambricon.com/mlu", "Cambricon MLU", "cncl"),
    DeviceKind("google.com/tpu", "Google TPU", "xla", Support.NONE),
    DeviceKind("*/gpu", "GPU of another vendor", "that of its torch", Support.TRAINER_IMAGE),
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


@dataclass(frozen=True)
class RequestedDevices:
    """Devices of one kind in the limits of a node."""

    resource: str
    count: int
    kind: DeviceKind


def find_device_kind(resource: str) -> DeviceKind | None:
    """Return the kind of device that a resource stands for; None for other resources and unknown devices."""
    if _matches(resource, _OTHER_RESOURCES):
        return None
    return next((kind for kind in DEVICE_KINDS if fnmatchcase(resource, kind.resource)), None)


def list_requested_devices(limits: Limits) -> Iterator[RequestedDevices]:
    """Yield the devices in the limits of a node, including unsupported ones.

    Raises: ValueError if the count of a device is not a quantity.
    """
    for resource, quantity in limits.items():
        kind = find_device_kind(resource)
        if kind is not None and (count := int(parse_quantity(quantity))):
            yield RequestedDevices(resource, count, kind)


def count_devices(limits: Limits) -> int:
    """Return the number of compute devices in the limits of a node, each of which one rank can use.

    Raises: ValueError if the count of a device is not a quantity.
    """
    return sum(devices.count for devices in list_requested_devices(limits) if devices.kind.support is not Support.NONE)


def find_uncountable_resource(limits: Limits) -> str | None:
    """Return an extended resource that may be a compute device of an unknown kind; None if a known one is requested."""
    requested = [name for name, count in limits.items() if parse_quantity(count)]
    if any(_is_device(name) for name in requested):
        return None
    return next((name for name in requested if _is_extended(name) and not _matches(name, _OTHER_RESOURCES)), None)


def _is_device(name: str) -> bool:
    kind = find_device_kind(name)
    return kind is not None and kind.support is not Support.NONE


def _is_extended(name: str) -> bool:
    """Return whether the resource is not one of Kubernetes itself, such as cpu or hugepages-2Mi."""
    domain, slash, _ = name.partition("/")
    is_native = domain == _KUBERNETES_DOMAIN or domain.endswith("." + _KUBERNETES_DOMAIN)
    return bool(slash) and (not is_native or domain == _DEVICE_CLASS_DOMAIN)


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)
