"""Comparison of objects with golden files in tests/golden; UPDATE_GOLDENS=1 rewrites the files.

A golden file contains YAML, or a difference from the YAML of one of BASES. A difference has the marks of a unified diff
but no line numbers, so that most changes of a base do not change it: a kept (" ") or removed ("-") line is the next
line of the base that equals it, and all lines of the base that a difference does not name are kept.
"""

import os
from collections.abc import Callable, Iterable, Iterator
from difflib import SequenceMatcher, unified_diff
from pathlib import Path
from typing import Any

import yaml

from finetune_operator.plan.manifests import build_children
from finetune_operator.plan.object_metadata import Manifest
from testing.builders.manifests import build_first_pod_manifest, build_run_plan

IS_UPDATE = os.environ.get("UPDATE_GOLDENS") == "1"
FOLDER = Path(__file__).parents[2] / "tests" / "golden"
HEADER = "# Written by `UPDATE_GOLDENS=1 pytest tests/unit/finetune_operator/plan`; do not edit."
NVIDIA_GPUS: dict[str, Any] = {"nprocPerNode": None, "resources": {"limits": {"nvidia.com/gpu": 8}}}
BASES: dict[str, Callable[[], Iterable[Manifest]]] = {
    "two-nodes": lambda: build_children(build_run_plan(attempt=1)),
    "pods/nvidia-gpu": lambda: [build_first_pod_manifest(**NVIDIA_GPUS)],
}


def assert_golden(name: str, objects: Iterable[Manifest], *, base: str | None = None) -> None:
    """Assert that the objects equal the golden file, regardless of key order.

    The golden file contains the difference from `base`, a name in BASES, or all lines.
    """
    found = dump(objects)
    path = FOLDER / f"{name}.{'diff' if base else 'yaml'}"
    if IS_UPDATE:
        if base:
            assert_golden(base, BASES[base]())
        lines = [f"--- {base}.yaml", *find_difference(dump(BASES[base]()), found)] if base else found
        path.write_text("\n".join((HEADER, *lines, "")))

    assert path.exists(), f"no {path.name}; UPDATE_GOLDENS=1 writes it"
    expected = read_golden(path)
    if found != expected:
        raise AssertionError("\n".join(unified_diff(expected, found, path.name, "objects", lineterm="")))


def dump(objects: Iterable[Manifest]) -> list[str]:
    """Return the lines of the YAML of the objects."""
    text: str = yaml.safe_dump_all(objects, sort_keys=True, width=1000, explicit_start=True)
    return text.splitlines()


def read_golden(path: Path) -> list[str]:
    """Return the lines of YAML that the golden file contains, or that its base and its difference describe."""
    _, *lines = path.read_text().splitlines()
    if path.suffix == ".yaml":
        return lines
    return list(apply_difference(read_golden(FOLDER / lines[0].removeprefix("--- ")), lines[1:]))


def find_difference(base: list[str], lines: list[str]) -> list[str]:
    """Return the difference, with as few kept lines before each change as make its place in the base unique."""
    differences = (list(list_changes(base, lines, context=context)) for context in range(1, len(base) + 1))
    return next(difference for difference in differences if list(apply_difference(base, difference)) == lines)


def list_changes(base: list[str], lines: list[str], *, context: int) -> Iterator[str]:
    """Yield the removed and added lines, each group of them after `context` kept lines."""
    end = 0
    for tag, start, stop, first, last in SequenceMatcher(None, base, lines, autojunk=False).get_opcodes():
        if tag != "equal":
            yield from (f" {line}" for line in base[max(end, start - context) : start])
            yield from (f"-{line}" for line in base[start:stop])
            yield from (f"+{line}" for line in lines[first:last])
            end = stop


def apply_difference(base: list[str], difference: Iterable[str]) -> Iterator[str]:
    """Yield the lines of the base with the changes of the difference."""
    position = 0
    for change in difference:
        mark, line = change[0], change[1:]
        if mark != "+":
            assert line in base[position:], f"the base has no such line here: {line!r}; UPDATE_GOLDENS=1 may help"
            place = base.index(line, position)
            yield from base[position:place]
            position = place + 1
        if mark != "-":
            yield line
    yield from base[position:]
