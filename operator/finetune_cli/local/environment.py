"""Builds the environment variables of a local node from those of its pod."""

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
from finetune_operator.plan.pod_environment import SHARED_HUB_CACHES

LOOPBACK = "127.0.0.1"
LOOPBACK_INTERFACE = "lo0" if sys.platform == "darwin" else "lo"
# Pod variables that local mode omits, so that access tokens and models in the user's home directory are used.
POD_ONLY_VALUES = {
    ("HOME", names.TMP_DIR),
    ("USER", names.USER),
    *SHARED_HUB_CACHES.items(),
}


@dataclass(frozen=True)
class NodePlacement:
    """Mounts, ports and GPUs of one local node."""

    mounts: tuple[LocalMount, ...]
    master_port: int
    status_port: int
    gpus: tuple[str, ...]


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
    container_env = {name: value for name, value in values.items() if value is not None}
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
        names.ENV_STATUS_PORT: str(placement.status_port),
    }


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
