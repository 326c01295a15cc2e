"""Run several small trainings (cells) in one launch of torchrun."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from testing.processes.supervisors import REPOSITORY, find_free_port

Results = dict[str, dict[str, Any]]


def run_cells(
    folder: Path, cells: dict[str, Any], *, ranks: int, slow_rank: int | None = None, forecasts: bool = False
) -> Results:
    """Run all cells (name to spec) in one launch of torchrun and return their results by name.

    slow_rank: rank that is slowed down, like a rank with a throttled GPU.
    forecasts: whether memory is forecast at the start, which takes as long as three steps of a tiny model.
    """
    folder.mkdir(exist_ok=True)
    (folder / "cells.json").write_text(json.dumps(cells))
    environment = {
        **build_rank_environment(),
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
        **({} if forecasts else {"TEST_WITHOUT_FORECASTS": "1"}),
    }
    logs = ("--redirects=2", f"--log-dir={folder / 'logs of ranks'}")
    torchrun = ("-m", "torch.distributed.run", f"--nproc-per-node={ranks}", f"--master-port={find_free_port()}", *logs)
    script = (
        str(REPOSITORY / "testing/processes/torchrun_cells.py"),
        str(folder / "cells.json"),
        str(folder / "results.json"),
    )
    completed = subprocess.run((sys.executable, *torchrun, *script), env=environment, capture_output=True, timeout=1100)
    assert completed.returncode == 0, completed.stderr.decode()[-3_000:] + read_stderr_tails(folder / "logs of ranks")
    results: Results = json.loads((folder / "results.json").read_text())
    return results


def run_script(script: str, folder: Path, *arguments: str, ranks: int) -> list[dict[str, Any]]:
    """Run a script of testing/processes in several ranks; return the content of the RANK.json that each one writes.

    folder: first argument of the script, to which it writes.
    """
    torchrun = ("-m", "torch.distributed.run", f"--nproc-per-node={ranks}", f"--master-port={find_free_port()}")
    command = (sys.executable, *torchrun, str(REPOSITORY / "testing/processes" / script), str(folder), *arguments)
    completed = subprocess.run(command, env=build_rank_environment(), capture_output=True, timeout=300)
    assert completed.returncode == 0, completed.stderr.decode()[-3_000:]
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(ranks)]


def build_rank_environment() -> dict[str, str]:
    """Return the environment of ranks that import the project from the repository."""
    return {
        **os.environ,
        # inherited paths may contain packages that were installed for this run
        "PYTHONPATH": os.pathsep.join(
            [*(str(REPOSITORY / part) for part in ("operator", "trainer", "")), os.environ.get("PYTHONPATH", "")]
        ),
        "OMP_NUM_THREADS": "1",
        "PYTHONFAULTHANDLER": "1",  # print the Python stack if a rank crashes
    }


def read_stderr_tails(folder: Path) -> str:
    """Return the end of each rank's stderr; the rank that stopped writing first is last, as the likely cause."""
    logs = sorted(folder.glob("**/stderr.log"), key=lambda log: log.stat().st_mtime, reverse=True)
    return "".join(f"\n--- rank {log.parent.name}:\n{log.read_text()[-10_000:]}" for log in logs)
