"""Shrinks a combination that differs from the reference to the fewest and simplest options, and prints it as a job."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import yaml

from testing.reference.combination import Combination, Layout, is_valid
from testing.reference.job import build_spec, write_files

FindDifferent = Callable[[Sequence[Combination]], Sequence[Combination]]
_KEPT = ("seed", "layout", "steps")  # the seed determines the rows, on which a difference may depend


def shrink(combination: Combination, find_different: FindDifferent) -> Combination:
    """Return the combination with as many options at their simplest values as possible that still differs.

    find_different: returns those of several combinations that differ; it is called with all candidates at once, because
    they share launches.
    """
    simplest = combination
    while different := find_different([each for each in list_simpler(simplest) if is_valid(each)]):
        together = _join_changes(simplest, different)
        simplest = together if is_valid(together) and find_different([together]) else different[0]
    return simplest


def list_simpler(combination: Combination) -> Iterator[Combination]:
    """Yield combinations with one option, or one number of the layout, at a simpler value."""
    for each in fields(Combination):
        if each.name not in _KEPT and getattr(combination, each.name) != each.default:
            default: dict[str, Any] = {each.name: each.default}
            yield replace(combination, **default)
    layout = combination.layout
    simpler = (Layout(), Layout(1, layout.micro_batch, layout.accumulation), replace(layout, preset="ddp"))
    yield from (replace(combination, layout=each) for each in simpler if each != layout and combination.resume is None)
    if combination.steps > 1:
        yield replace(combination, steps=combination.steps - 1)


def _join_changes(base: Combination, changed: Sequence[Combination]) -> Combination:
    """Return the base with the changes of all combinations; the first one decides where they change the same option."""
    changes: dict[str, Any] = {}
    for each in reversed(changed):
        for option in fields(Combination):
            if (value := getattr(each, option.name)) != getattr(base, option.name):
                changes[option.name] = value
    return replace(base, **changes)


def format_job(combination: Combination, folder: Path) -> str:
    """Write the files of a combination into the folder, and return the job file that names them."""
    files = write_files(combination, folder / "data", models=folder / "models")
    job = {
        "apiVersion": "finetune.dev/v1alpha1",
        "kind": "FineTuneJob",
        "metadata": {"name": "difference"},
        "spec": build_spec(combination, files, combination.layout),
    }
    return yaml.safe_dump(job, sort_keys=False)
