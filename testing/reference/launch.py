"""Runs combinations with the trainer in a few launches, one per number of ranks.

The ranks run `testing.processes.recorded_cells`. This module has no access to the trainer, only to the files of a run.
"""

import json
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from testing.processes.launches import run_cells
from testing.reference.combination import Combination
from testing.reference.job import JobFiles, build_spec, write_files
from testing.reference.record import Record, read_record

WORKER = "testing.processes.recorded_cells"
INITIAL_ADAPTER = "initial.safetensors"


@dataclass(frozen=True)
class TrainerRun:
    """What a training of the trainer left: its log, its folder and the rows of its micro-batches, or an error."""

    options: Combination
    files: JobFiles
    folder: Path
    error: str | None = None
    log: tuple[dict[str, Any], ...] = ()
    record: Record | None = None

    @property
    def initial_adapter(self) -> Path:
        """File with the initial values of the adapter."""
        return self.folder / INITIAL_ADAPTER


def run_trainer(
    combinations: Mapping[str, Combination], folder: Path, *, bugs: Mapping[str, str] | None = None
) -> dict[str, TrainerRun]:
    """Train all combinations, by name, and return their runs.

    bugs: by name of a combination, the function (`module:function`) of a test that plants a bug.
    """
    cells = folder / "cells"
    cells.mkdir(exist_ok=True)
    files, bugs_by_cell = dict[str, JobFiles](), dict[str, str]()
    specs: defaultdict[tuple[bool, int], dict[str, Any]] = defaultdict(dict)  # by whether they resume, and ranks
    for name, options in combinations.items():
        files[name] = write_files(options, folder / "data" / name, models=folder / "models")
        for cell, layout in zip(name_cells(name, options), options.layouts, strict=True):
            specs[cell != name, layout.ranks][cell] = build_spec(options, files[name], layout)
            bugs_by_cell |= {cell: bugs[name]} if bugs else {}
    (cells / "bugs.json").write_text(json.dumps(bugs_by_cell))
    results: dict[str, dict[str, Any]] = {}
    for resumes, ranks in sorted(specs):
        results |= run_cells(cells, specs[resumes, ranks], ranks=ranks, module=WORKER)
    return {name: _collect(options, files[name], cells, name, results) for name, options in combinations.items()}


def name_cells(name: str, options: Combination) -> tuple[str, ...]:
    """Return the name of the cell, and that of the one which resumes from its checkpoint, if any."""
    return (name, f"{name} resumed <- {name}") if options.resume else (name,)


def _collect(
    options: Combination, files: JobFiles, cells: Path, name: str, results: Mapping[str, dict[str, Any]]
) -> TrainerRun:
    for each in (names := name_cells(name, options)):
        if "error" in results[each]:
            return TrainerRun(options, files, cells / each, f"{results[each]['error']}: {results[each]['message']}")
    last = names[-1]
    record = read_record(cells / name, ranks=options.layout.ranks)
    if options.resume:
        resumed = read_record(cells / last, ranks=options.resume.ranks)
        if (first := min(resumed.steps)) != options.resume_after + 1:
            return TrainerRun(options, files, cells / last, f"resumed at step {first}")
        record = record.continue_with(resumed)
    log = json.loads((cells / last / "result/trainer_state.json").read_text())["log_history"]
    return TrainerRun(options, files, cells / last, None, tuple(log), record)
