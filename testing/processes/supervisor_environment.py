"""Environment variables for a supervisor that runs as a local process."""

import os
from pathlib import Path

from testing.processes.supervisors import REPOSITORY


def build_supervisor_environment(folder: Path) -> dict[str, str]:
    """Return the environment variables of the second of two nodes, with all output paths below `folder`."""
    (folder / "run").mkdir()
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(str(REPOSITORY / part) for part in ("operator", "trainer")),
        "FINETUNE_NAMESPACE": "default",
        "FINETUNE_JOB": "bert",
        "FINETUNE_JOB_UID": "ours",
        "FINETUNE_ATTEMPT": "0",
        "FINETUNE_WORLD_SIZE": "1",
        "FINETUNE_OUTPUT": str(folder / "output"),
        "FINETUNE_RUN_DIR": str(folder / "run"),
        "FINETUNE_TERMINATION_LOG": str(folder / "termination-log"),
        "FINETUNE_STATUS_PORT": "0",
        "NODE_RANK": "1",
        "NNODES": "2",
        "NPROC_PER_NODE": "1",
        "MASTER_ADDR": "nobody.invalid",
        "MASTER_PORT": "29500",
    }
