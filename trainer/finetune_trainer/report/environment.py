"""Describe the hardware and the versions of libraries of a run, for its report and its model card."""

import platform
from importlib.metadata import PackageNotFoundError, version

import torch

_PACKAGES = ("torch", "transformers", "peft", "accelerate", "deepspeed", "finetune-operator")


def describe_device() -> str:
    """Return the model name of the GPU of this rank, or of the processor."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or platform.machine()


def list_versions() -> dict[str, str]:
    """Return the versions of Python, CUDA and the installed libraries that affect a training."""
    versions = {"Python": platform.python_version()}
    if torch.version.cuda:
        versions["CUDA"] = torch.version.cuda
    found = {name: _find_installed_version(name) for name in _PACKAGES}
    return {**versions, **{name: installed for name, installed in found.items() if installed is not None}}


def _find_installed_version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
