"""Shrinks a combination that differs from the reference to the fewest and simplest options, and prints it as a job."""

import tempfile
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import yaml

from testing.reference.combination import Combination, Layout, is_valid
from testing.reference.compare import Report, check
from testing.reference.job import build_spec, write_files
from testing.reference.launch import run_trainer

Differs = Callable[[Combination], bool]
_KEPT = ("seed", "layout", "steps")  # the seed determines the rows, on which a difference may depend


def shrink(combination: Combination, differs: Differs) -> Combination:
    """Return the combination with as many options at their simplest values as possible, of which `differs` is true."""
    simplest, is_changed = combination, True
    while is_changed:
        is_changed = False
        for candidate in list_simpler(simplest):
            if is_valid(candidate) and differs(candidate):
                simplest, is_changed = candidate, True
                break
    return simplest


def list_simpler(combination: Combination) -> Iterator[Combination]:
    """Yield combinations with one option, or one number of the layout, at a simpler value."""
    changed = [each for each in fields(Combination) if each.name not in _KEPT]
    for each in changed:
        if getattr(combination, each.name) != each.default:
            default: dict[str, Any] = {each.name: each.default}
            yield replace(combination, **default)
    layout = combination.layout
    simpler = (Layout(), Layout(1, layout.micro_batch, layout.accumulation), replace(layout, preset="ddp"))
    yield from (replace(combination, layout=each) for each in simpler if each != layout and combination.resume is None)
    if combination.steps > 1:
        yield replace(combination, steps=combination.steps - 1)


def check_alone(combination: Combination) -> Report:
    """Train and compare one combination in launches of its own."""
    with tempfile.TemporaryDirectory(prefix="reference-") as folder:
        return check(run_trainer({"shrunk": combination}, Path(folder))["shrunk"])


def format_job(combination: Combination) -> str:
    """Return the job file of a combination, with the names of files that `write_files` creates."""
    with tempfile.TemporaryDirectory() as folder:
        files = write_files(combination, Path(folder) / "data", models=Path(folder) / "models")
        spec: dict[str, Any] = build_spec(combination, files, combination.layout)
        job = {
            "apiVersion": "finetune.dev/v1alpha1",
            "kind": "FineTuneJob",
            "metadata": {"name": "difference"},
            "spec": spec,
        }
        return yaml.safe_dump(job, sort_keys=False).replace(folder, "FOLDER")
