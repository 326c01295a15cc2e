"""Comparison of objects with golden files in tests/golden; UPDATE_GOLDENS=1 rewrites the files."""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

FOLDER = Path(__file__).parents[2] / "tests" / "golden"
HEADER = "# Written by `UPDATE_GOLDENS=1 pytest tests/unit/finetune_operator/plan`; do not edit.\n"


def assert_golden(name: str, objects: Iterable[dict[str, Any]]) -> None:
    """Assert that the objects equal the golden file, regardless of key order."""
    path = FOLDER / f"{name}.yaml"
    text = HEADER + yaml.safe_dump_all(objects, sort_keys=True, width=1000, explicit_start=True)
    if os.environ.get("UPDATE_GOLDENS") == "1":
        path.write_text(text)
    assert path.exists(), f"no {path.name}; UPDATE_GOLDENS=1 writes it"
    assert text == path.read_text()
