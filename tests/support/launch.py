"""Several small trainings in one torchrun, from a test's side."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from support.pods import REPOSITORY, free_port

Results = dict[str, dict[str, Any]]


def launch(folder: Path, cells: dict[str, Any], *, ranks: int, slow_rank: int | None = None) -> Results:
    """All cells in one torchrun."""
    folder.mkdir()
    (folder / "cells.json").write_text(json.dumps(cells))
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(str(REPOSITORY / part) for part in ("operator", "trainer", "tests")),
        "OMP_NUM_THREADS": "1",
        "FINETUNE_WORLD_SIZE": str(ranks),
        "FINETUNE_CONFIG": "unused",
        "FINETUNE_OUTPUT": "unused",
        "FINETUNE_CACHE_DIR": str(folder / "cache"),
        "FINETUNE_RUN_DIR": str(folder / "run"),
        "FINETUNE_JOB_UID": "unused",
        "FINETUNE_NAMESPACE": "default",
        "FINETUNE_JOB": "unused",
        "FINETUNE_ATTEMPT": "0",
        **({} if slow_rank is None else {"TEST_SLOW_RANK": str(slow_rank)}),
    }
    torchrun = ("-m", "torch.distributed.run", f"--nproc-per-node={ranks}", f"--master-port={free_port()}")
    script = (str(REPOSITORY / "tests/support/layouts.py"), str(folder / "cells.json"), str(folder / "results.json"))
    done = subprocess.run((sys.executable, *torchrun, *script), env=environment, capture_output=True, timeout=900)
    assert done.returncode == 0, done.stderr.decode()[-30_000:]
    results: Results = json.loads((folder / "results.json").read_text())
    return results
