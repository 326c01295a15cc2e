"""Builds the environment variables of a local node from those of its pod."""

import os
import socket
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass

from finetune_api.v1alpha1.job import FineTuneJobSpec
from finetune_api.v1alpha1.pod_types import RESERVED_ENV, RESERVED_ENV_PREFIXES
from finetune_cli.errors import BadInput
from finetune_cli.local.gpus import CUDA_VISIBLE_DEVICES
from finetune_cli.local.volume_mapping import LocalMount, map_to_local_path
from finetune_operator import names
from finetune_operator.observation.ownership import RawBody
from finetune_operator.plan.pod_environment import SHARED_HUB_CACHES, compute_threads_per_rank

LOOPBACK = "127.0.0.1"
LOOPBACK_INTERFACE = "lo0" if sys.platform == "darwin" else "lo"
# Pod variables that local mode omits, so that access tokens and models in the user's home directory are used.
POD_ONLY_VALUES = {
    ("HOME", names.TMP_DIR),
    ("USER", names.USER),
    *SHARED_HUB_CACHES.items(),
}
# The devices of this machine need not be those of the limits.
DEVICE_VARIABLES = (names.ENV_GPUS, names.ENV_OTHER_GPUS)


@dataclass(frozen=True)
class NodePlacement:
    """Mounts, ports, GPUs and CPUs of one local node."""

    mounts: tuple[LocalMount, ...]
    master_port: int
    status_port: int
    gpus: tuple[str, ...]
    cpus: int


def check_environment(spec: FineTuneJobSpec, inherited_env: Mapping[str, str]) -> None:
    """Raise BadInput if the user's environment lacks a variable with valueFrom, which only a cluster can resolve."""
    missing_names = [
        variable.name for variable in spec.env if variable.value_from and variable.name not in inherited_env
    ]
    if missing_names:
        raise BadInput(
            *(f"spec.env: {name}: valueFrom needs a cluster; set {name} in your environment" for name in missing_names)
        )


def build_environment(container: RawBody, placement: NodePlacement, inherited_env: Mapping[str, str]) -> dict[str, str]:
    """Return the inherited environment, overridden by the container's variables with local paths and addresses."""
    inherited_values = {name: value for name, value in inherited_env.items() if not _is_reserved(name)}
    values = {variable["name"]: _resolve_value(variable, placement, inherited_env) for variable in container["env"]}
    container_env = {
        name: value for name, value in values.items() if value is not None and name not in DEVICE_VARIABLES
    }
    rendezvous = {"MASTER_ADDR": LOOPBACK, "MASTER_PORT": str(placement.master_port)}
    loopback = {f"{library}_SOCKET_IFNAME": LOOPBACK_INTERFACE for library in ("GLOO", "NCCL")}
    devices = {CUDA_VISIBLE_DEVICES: ",".join(placement.gpus)} if placement.gpus else {}
    return {
        **inherited_values,
        **container_env,
        **rendezvous,
        **{f"PET_{name}": value for name, value in rendezvous.items()},
        **loopback,
        **devices,
        **_limit_cpus(container_env, placement.cpus),
        names.ENV_STATUS_HOST: LOOPBACK,
        names.ENV_STATUS_PORT: str(placement.status_port),
    }


def count_cpus_per_node(node_count: int) -> int:
    """Return the CPUs that this process may use, divided by the nodes of the job; at least 1."""
    has_affinity = hasattr(os, "sched_getaffinity")  # Linux only
    cpus = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
    return max(1, cpus // node_count)


def _limit_cpus(container_env: Mapping[str, str], cpus: int) -> dict[str, str]:
    """Return the variables that depend on the CPUs, limited to those of this host; a user's own value is kept."""
    planned = container_env.get(names.ENV_CPUS)
    available, ranks = float(cpus) if planned is None else min(float(planned), cpus), container_env["NPROC_PER_NODE"]
    variables = {names.ENV_CPUS: f"{available:g}"}
    operator_threads = compute_threads_per_rank(None if planned is None else float(planned), ranks=int(ranks))
    if container_env["OMP_NUM_THREADS"] != str(operator_threads) or planned is None:
        return variables
    return {**variables, "OMP_NUM_THREADS": str(compute_threads_per_rank(available, ranks=int(ranks)))}


def find_free_ports(count: int) -> list[int]:
    """Return distinct free ports. They are not reserved: another process can bind a port before the node does."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for port_socket in sockets:
            port_socket.bind((LOOPBACK, 0))
        return [port_socket.getsockname()[1] for port_socket in sockets]


def _is_reserved(name: str) -> bool:
    """Return whether torchrun or the operator sets the variable, which therefore must not be inherited."""
    return name in RESERVED_ENV or name.startswith(RESERVED_ENV_PREFIXES)


def _resolve_value(variable: RawBody, placement: NodePlacement, inherited_env: Mapping[str, str]) -> str | None:
    name = variable["name"]
    if "valueFrom" in variable:
        return inherited_env.get(name)
    value = variable.get("value", "")
    if (name, value) in POD_ONLY_VALUES:
        return None
    return map_to_local_path(value, placement.mounts) or value
