"""GPUs of this machine, divided among the nodes: in a cluster that is the device plugin's work."""

import shutil
import subprocess
from collections.abc import Mapping

from finetune_api.v1alpha1.job import FineTuneJobSpec
from finetune_cli.errors import BadInput

VISIBLE = "CUDA_VISIBLE_DEVICES"


def find_gpus(environment: Mapping[str, str]) -> tuple[str, ...]:
    """What CUDA_VISIBLE_DEVICES names, or every GPU that the driver shows."""
    if (visible := environment.get(VISIBLE)) is not None:
        return tuple(device.strip() for device in visible.split(",") if device.strip() not in ("", "-1"))
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return ()
    query = [tool, "--query-gpu=index", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ()
    return tuple(answer.stdout.split()) if answer.returncode == 0 else ()


def divide_gpus(gpus: tuple[str, ...], spec: FineTuneJobSpec) -> tuple[tuple[str, ...], ...]:
    """One GPU per rank, neighbours on one node; empty shares on a machine without any. Raises BadInput."""
    ranks = spec.ranks_per_node
    if not gpus:
        return ((),) * spec.num_nodes
    if len(gpus) < spec.world_size:
        raise BadInput(
            f"{spec.num_nodes} nodes x {ranks} processes need {spec.world_size} GPUs, this machine has {len(gpus)};"
            f" lower spec.numNodes or spec.nprocPerNode, or train on CPUs with {VISIBLE}= in the environment"
        )
    return tuple(gpus[node * ranks : (node + 1) * ranks] for node in range(spec.num_nodes))
