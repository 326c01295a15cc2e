"""The supervisor as a foreign image gets it."""

import base64
from pathlib import Path

from finetune_operator.plan.supervisor_bundle import pack_supervisor


def write_supervisor(folder: Path) -> Path:
    """The file in `folder`."""
    path = folder / "supervisor.pyz"
    path.write_bytes(base64.b64decode(pack_supervisor()))
    return path
