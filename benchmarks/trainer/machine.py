"""Describes the machine of a benchmark: GPU, driver, libraries, and whether SDPA may use cuDNN.

`python -m benchmarks.trainer.machine` prints the description as JSON.
"""

import importlib.util
import json
import os
import platform
import re
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

PACKAGES = (
    "torch",
    "transformers",
    "accelerate",
    "peft",
    "trl",
    "datasets",
    "deepspeed",
    "bitsandbytes",
    "huggingface_hub",
    "tokenizers",
    "triton",
    "pydantic",
)
# modules that not every machine has, and that cases of the GPU check require
MODULES = ("trl", "datasets", "deepspeed", "bitsandbytes", "torch.nn.attention.varlen")
_DRIVER_FILE = Path("/proc/driver/nvidia/version")
_GPU_QUERY = "memory.used,utilization.gpu,ecc.errors.uncorrected.volatile.total,clocks_event_reasons.active"
GIB = 2**30


def describe_machine() -> dict[str, Any]:
    """Return the properties that the results of a benchmark depend on."""
    on_gpu = torch.cuda.is_available()
    return {
        "cuda": on_gpu,
        "python": platform.python_version(),
        "cpus": len(os.sched_getaffinity(0)),
        "packages": {name: found for name in PACKAGES if (found := find_version(name))},
        "modules": {name: find_module(name) for name in MODULES},
        **(describe_gpu() if on_gpu else {}),
    }


def describe_gpu() -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(0)
    return {
        "gpu": properties.name,
        "gpu_memory_gib": round(properties.total_memory / GIB, 1),
        "driver": read_driver_version(),
        "cuda_version": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),  # type: ignore[no-untyped-call]
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),  # type: ignore[no-untyped-call]
        "cudnn_attention": torch.backends.cuda.cudnn_sdp_enabled(),  # type: ignore[no-untyped-call]
        "flash_attention": torch.backends.cuda.flash_sdp_enabled(),  # type: ignore[no-untyped-call]
        "counters": query_gpu_counters(),
    }


def summarise_machine(machine: dict[str, Any]) -> str:
    """Return the description as one line."""
    libraries = ", ".join(f"{name} {number}" for name, number in machine["packages"].items())
    if not machine["cuda"]:
        return f"CPU, Python {machine['python']}, {libraries}"
    return (
        f"{machine['gpu']}, driver {machine['driver']}, CUDA {machine['cuda_version']}, cuDNN {machine['cudnn']}"
        f" (attention: {'on' if machine['cudnn_attention'] else 'off'}), NCCL {machine['nccl']},"
        f" Python {machine['python']}, {libraries}"
    )


def find_version(package: str) -> str:
    """Return the version of a package, or an empty string if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def find_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # the parent package is missing
        return False


def read_driver_version() -> str:
    try:
        match = re.search(r"\d+\.\d+(?:\.\d+)?", _DRIVER_FILE.read_text())
    except OSError:
        match = None
    return match[0] if match else "unknown"


def query_gpu_counters() -> str:
    """Return the counters of the first GPU that NVML reports through nvidia-smi, or the reason why not."""
    command = ["nvidia-smi", f"--query-gpu={_GPU_QUERY}", "--format=csv", "--id=0"]
    try:
        process = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{type(error).__name__}: {error}"
    return " | ".join(process.stdout.splitlines()) or process.stderr.strip()


if __name__ == "__main__":
    print(json.dumps(describe_machine()))
