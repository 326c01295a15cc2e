"""Build the zipped supervisor that the operator mounts into users' images."""

import base64
from pathlib import Path

from finetune_operator.plan.supervisor_bundle import pack_supervisor


def write_supervisor(folder: Path) -> Path:
    """Write supervisor.pyz into the folder and return its path."""
    path = folder / "supervisor.pyz"
    path.write_bytes(base64.b64decode(pack_supervisor()))
    return path
