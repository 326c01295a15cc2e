"""The environment of a pod, made fit for a process of this machine."""

import socket
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from finetune_api.v1alpha1.job import RESERVED_ENV, RESERVED_ENV_PREFIXES, FineTuneJobSpec
from finetune_cli.errors import BadInput
from finetune_cli.local.gpus import VISIBLE
from finetune_cli.local.volume_mapping import Mount, to_local
from finetune_operator import names

Raw = dict[str, Any]

LOOPBACK = "127.0.0.1"
LOOPBACK_INTERFACE = "lo0" if sys.platform == "darwin" else "lo"
# The pod's own homes and user: at home, the real ones are better (an access token, models that were downloaded before).
POD_HOMES = {
    ("HOME", names.TMP_DIR),
    ("USER", names.USER),
    ("HF_HOME", f"{names.OUTPUT_DIR}/cache/huggingface"),
}


@dataclass(frozen=True)
class Place:
    """Where one node runs on this machine."""

    mounts: tuple[Mount, ...]
    master_port: int
    status_port: int
    gpus: tuple[str, ...]


def check_environment(spec: FineTuneJobSpec, inherited: Mapping[str, str]) -> None:
    """Secrets and fields of a cluster cannot be read here; the user's own environment stands in. Raises BadInput."""
    missing = [variable.name for variable in spec.env if variable.value_from and variable.name not in inherited]
    if missing:
        raise BadInput(
            *(f"spec.env: {name}: valueFrom needs a cluster; set {name} in your environment" for name in missing)
        )


def local_environment(container: Raw, place: Place, inherited: Mapping[str, str]) -> dict[str, str]:
    """What the container would get, over what this process has; paths and addresses are those of this machine."""
    own = {name: value for name, value in inherited.items() if not _is_reserved(name)}
    given = {variable["name"]: _value(variable, place, inherited) for variable in container["env"]}
    kept = {name: value for name, value in given.items() if value is not None}
    rendezvous = {"MASTER_ADDR": LOOPBACK, "MASTER_PORT": str(place.master_port)}
    loopback = {f"{library}_SOCKET_IFNAME": LOOPBACK_INTERFACE for library in ("GLOO", "NCCL")}
    devices = {VISIBLE: ",".join(place.gpus)} if place.gpus else {}
    return {
        **own,
        **kept,
        **rendezvous,
        **{f"PET_{name}": value for name, value in rendezvous.items()},
        **loopback,
        **devices,
        names.ENV_STATUS_PORT: str(place.status_port),
    }


def find_ports(count: int) -> list[int]:
    """Ports that are free now, each another; whoever takes one of them first wins."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind((LOOPBACK, 0))
        return [each.getsockname()[1] for each in sockets]


def _is_reserved(name: str) -> bool:
    """A variable of another torchrun or operator that this process was started by."""
    return name in RESERVED_ENV or name.startswith(RESERVED_ENV_PREFIXES)


def _value(variable: Raw, place: Place, inherited: Mapping[str, str]) -> str | None:
    name = variable["name"]
    if "valueFrom" in variable:
        return inherited.get(name)
    value = variable.get("value", "")
    if (name, value) in POD_HOMES:
        return None
    return to_local(value, place.mounts) or value
