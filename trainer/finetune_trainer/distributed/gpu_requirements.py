"""Check that torch can use the GPUs of this container: that they are visible, their driver and their architecture.

Without these checks, a rank would train on the CPU, or fail at its first kernel with a message without the versions.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from finetune_trainer.errors import DriverMismatch, GpuUnavailable, InvalidSpec, TrainerError

_DRIVER_FILE = Path("/proc/driver/nvidia/version")  # version of the host's kernel module, independent of the image
# Source: NVIDIA, CUDA compatibility, "Minor Version Compatibility": the oldest driver branch by major version of CUDA.
_OLDEST_DRIVERS = {11: 450, 12: 525, 13: 580}
AMD_GPU = "amd.com/gpu"
_ALL_OR_NONE = ("", "all", "none", "void")  # values of NVIDIA_VISIBLE_DEVICES that images set by themselves


@dataclass(frozen=True)
class TorchBuild:
    """Version of torch, the version of CUDA for which it was built (None: for CPUs), and its GPU architectures."""

    version: str
    cuda: str | None
    architectures: tuple[str, ...] = ()

    @property
    def oldest_driver(self) -> int | None:
        """Oldest driver branch that this version of CUDA supports; None if it is not known."""
        return _OLDEST_DRIVERS.get(int(self.cuda.partition(".")[0])) if self.cuda else None

    @property
    def requirement(self) -> str:
        """The driver and the GPUs that torch needs, for an error message."""
        driver = (
            f" needs NVIDIA driver {self.oldest_driver} or newer" if self.oldest_driver else " needs a newer driver"
        )
        return f"torch {self.version} for CUDA {self.cuda}{driver}"


@dataclass(frozen=True)
class Card:
    """Model name and compute capability of a GPU."""

    name: str
    capability: tuple[int, int]


def read_driver_version(driver_file: Path = _DRIVER_FILE) -> str:
    """Return the version of the NVIDIA driver; empty without one, or if the container runtime hides its file."""
    try:
        match = re.search(r"\d+\.\d+(?:\.\d+)?", driver_file.read_text())
    except OSError:
        return ""
    return match[0] if match else ""


def hides_gpus(environment: Mapping[str, str]) -> bool:
    """Return whether the user hides the GPUs from torch, to train on the CPU; torch for ROCm also reads it."""
    return environment.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1")


def find_expected_gpus(environment: Mapping[str, str], *, planned_gpus: int, devices: Path = Path("/dev")) -> str:
    """Return why GPUs are expected in this container; empty if there is no sign of them, or if they are hidden.

    planned_gpus: NVIDIA GPUs in the limits of the pod. devices: the folder with the device files.
    """
    if hides_gpus(environment):
        return ""
    if planned_gpus:
        return f"the limits of the pod contain {planned_gpus} GPUs"
    if files := sorted(devices.glob("nvidia[0-9]*")):
        return f"{files[0]} exists"
    visible = environment.get("NVIDIA_VISIBLE_DEVICES", "")
    return "" if visible in _ALL_OR_NONE else f"NVIDIA_VISIBLE_DEVICES is {visible}"


def explain_missing_gpus(expectation: str, build: TorchBuild, *, driver: str) -> TrainerError:
    """Return the error of a rank that finds no GPU although GPUs are expected."""
    if build.cuda is None:
        return InvalidSpec(
            f"{expectation}, but torch {build.version} is built for CPUs: use an image with torch for CUDA, or train on"
            " the CPU with an empty CUDA_VISIBLE_DEVICES in spec.env"
        )
    if is_too_old(driver, build):
        return DriverMismatch(f"{expectation}, but the NVIDIA driver {driver} is too old: {build.requirement}")
    found = f"driver {driver}" if driver else "no NVIDIA driver"
    return GpuUnavailable(
        f"{expectation}, but torch finds no usable GPU ({found}; {build.requirement}): check the device plugin, the"
        " runtime class (spec.podTemplate.runtimeClassName) and nvidia-smi on the Kubernetes node"
    )


def explain_missing_other_gpus(resource: str, build: TorchBuild, *, rocm: str | None) -> TrainerError:
    """Return the error of a rank that finds no GPU although the limits contain GPUs of another vendor than NVIDIA.

    rocm: version of ROCm for which torch was built; None if it was built for something else.
    """
    expectation = f"the limits of the pod contain {resource}"
    if resource == AMD_GPU and rocm is None:
        kind = f"CUDA {build.cuda}" if build.cuda else "CPUs"
        return InvalidSpec(
            f"{expectation}, but torch {build.version} is built for {kind}: set spec.image to an image of this trainer"
            " with torch for ROCm, or train on the CPU with an empty CUDA_VISIBLE_DEVICES in spec.env"
        )
    return GpuUnavailable(
        f"{expectation}, but torch {build.version} finds no usable GPU: check that spec.image has torch for this GPU,"
        " and the device plugin and the driver on the Kubernetes node"
    )


def is_too_old(driver: str, build: TorchBuild) -> bool:
    """Return whether the driver is older than the version of CUDA supports; False if a version is not known."""
    return bool(driver) and build.oldest_driver is not None and int(driver.partition(".")[0]) < build.oldest_driver


def check_architecture(card: Card, build: TorchBuild, *, driver: str) -> None:
    """Raise DriverMismatch if torch contains no code for the GPU."""
    if not build.architectures or any(_runs_on(name, card.capability) for name in build.architectures):
        return
    capability = ".".join(map(str, card.capability))
    raise DriverMismatch(
        f"torch {build.version} for CUDA {build.cuda} does not support {card.name} (compute capability {capability},"
        f" driver {driver or 'unknown'}): it contains code for {', '.join(build.architectures)}; choose other GPUs"
        " (spec.podTemplate.nodeSelector), or an image with torch for another version of CUDA (spec.image)"
    )


def _runs_on(architecture: str, capability: tuple[int, int]) -> bool:
    """Return whether code runs on a GPU: sm_86 on the same or a newer minor version, compute_86 on all newer GPUs.

    Code for sm_90a or sm_100f uses features of one architecture.
    """
    match = re.fullmatch(r"(sm|compute)_(\d+)(\d)([af]?)", architecture)
    if match is None:
        return False
    kind, major, minor, features = match[1], int(match[2]), int(match[3]), match[4]
    if features == "a":
        return (major, minor) == capability
    if kind == "compute" and not features:
        return (major, minor) <= capability
    return major == capability[0] and minor <= capability[1]
