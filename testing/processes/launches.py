"""Run several small trainings (cells), or a script, in the ranks of one launch."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from testing.processes.forks.fork_server import use_forks
from testing.processes.supervisors import REPOSITORY, find_free_port

CELLS_MODULE = "testing.processes.cells"

Results = dict[str, dict[str, Any]]


def run_cells(
    folder: Path,
    cells: dict[str, Any],
    *,
    ranks: int,
    slow_rank: int | None = None,
    forecasts: bool = False,
    module: str = CELLS_MODULE,
) -> Results:
    """Run all cells (name to spec) in one launch and return their results by name.

    slow_rank: rank that is slowed down, like a rank with a throttled GPU.
    forecasts: whether memory is forecast at the start, which takes as long as three steps of a tiny model.
    module: the program of the ranks.
    """
    folder.mkdir(exist_ok=True)
    (folder / "cells.json").write_text(json.dumps(cells))
    variables = {
        "TEST_CELLS": str(folder),
        **({} if slow_rank is None else {"TEST_SLOW_RANK": str(slow_rank)}),
        **({} if forecasts else {"TEST_WITHOUT_FORECASTS": "1"}),
    }
    _run_ranks(folder, "-m", module, ranks=ranks, variables=variables)
    results: Results = json.loads((folder / "results.json").read_text())
    return results


def run_script(script: str, folder: Path, *arguments: str, ranks: int) -> list[dict[str, Any]]:
    """Run a script of testing/processes in several ranks; return the content of the RANK.json that each one writes.

    folder: first argument of the script, to which it writes.
    """
    launch_folder = folder.with_name(f"{folder.name} launch")
    launch_folder.mkdir()
    _run_ranks(launch_folder, str(REPOSITORY / "testing/processes" / script), str(folder), *arguments, ranks=ranks)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(ranks)]


def _run_ranks(folder: Path, *program: str, ranks: int, variables: Mapping[str, str] = MappingProxyType({})) -> None:
    """Run a program in all ranks with the launcher of the supervisor.

    program: a script with arguments, or `-m` and a module with the functions `prepare` and `main`.
    """
    command = (sys.executable, "-u", "-m", "finetune_supervisor", "ranks", *program)
    environment = {**build_rank_environment(folder, ranks), **variables}
    with (folder / "log").open("wb") as log:
        completed = subprocess.run(command, env=environment, stdout=log, stderr=log, timeout=1100, check=False)
    assert completed.returncode == 0, (folder / "log").read_text(errors="replace")[-10_000:]


def build_rank_environment(folder: Path, ranks: int) -> dict[str, str]:
    """Return the environment of a launcher that imports the project from the repository."""
    # inherited paths may contain packages that were installed for this run
    paths = (*(str(REPOSITORY / part) for part in ("operator", "trainer", "")), os.environ.get("PYTHONPATH", ""))
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "OMP_NUM_THREADS": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(find_free_port()),
        "NNODES": "1",
        "NODE_RANK": "0",
        "NPROC_PER_NODE": str(ranks),
        "FINETUNE_WORLD_SIZE": str(ranks),
        "FINETUNE_CONFIG": "unused",
        "FINETUNE_OUTPUT": "unused",
        "FINETUNE_CACHE_DIR": str(folder / "cache"),
        "FINETUNE_RUN_DIR": str(folder / "run"),
        "FINETUNE_JOB_UID": "unused",
        "FINETUNE_NAMESPACE": "default",
        "FINETUNE_JOB": "unused",
        "FINETUNE_ATTEMPT": "0",
    }
    return use_forks(environment, module=CELLS_MODULE)
