"""Assigns the GPUs of the local host to nodes, as the device plugin does in a cluster."""

import shutil
import subprocess
from collections.abc import Mapping

from finetune_api.v1alpha1.job import FineTuneJobSpec
from finetune_cli.errors import BadInput

CUDA_VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"


def find_gpus(environment: Mapping[str, str]) -> tuple[str, ...]:
    """Return the GPUs in CUDA_VISIBLE_DEVICES, or if it is not set, all GPUs that nvidia-smi lists."""
    if (visible := environment.get(CUDA_VISIBLE_DEVICES)) is not None:
        return tuple(device.strip() for device in visible.split(",") if device.strip() not in ("", "-1"))
    nvidia_smi = shutil.which("nvidia-smi")
    if nvidia_smi is None:
        return ()
    command = [nvidia_smi, "--query-gpu=index", "--format=csv,noheader"]
    try:
        process = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ()
    return tuple(process.stdout.split()) if process.returncode == 0 else ()


def divide_gpus(gpus: tuple[str, ...], spec: FineTuneJobSpec) -> tuple[tuple[str, ...], ...]:
    """Assign one GPU per rank, or none on a host without GPUs. Raises BadInput if there are too few GPUs."""
    ranks = spec.ranks_per_node
    if not gpus:
        return ((),) * spec.num_nodes
    if len(gpus) < spec.world_size:
        raise BadInput(
            f"{spec.num_nodes} nodes x {ranks} processes need {spec.world_size} GPUs, this machine has {len(gpus)};"
            f" lower spec.numNodes or spec.nprocPerNode, or train on CPUs with {CUDA_VISIBLE_DEVICES}= in the"
            " environment"
        )
    return tuple(gpus[node * ranks : (node + 1) * ranks] for node in range(spec.num_nodes))
