"""Tests that the provoked lines of the corpus are what the installed libraries print."""

import json
import sys
from typing import Any

import pytest

from testing.corpus.error_corpus import FAILURE_FILES
from testing.corpus.provoke.runner import PROVOCATIONS, ProvokedError, find_description, provoke

PYTHON = "python {}.{}".format(*sys.version_info)
ENTRIES: dict[str, dict[str, Any]] = {}
for path in FAILURE_FILES:
    for line in path.read_text(encoding="utf-8").splitlines():
        entry = json.loads(line)
        if description := find_description(entry["source"]):
            assert description not in ENTRIES, f"two lines are provoked by {description!r}"
            ENTRIES[description] = entry


@pytest.mark.parametrize("description", PROVOCATIONS)
def test_line_is_what_the_installed_library_prints(description: str) -> None:
    entry = ENTRIES[description]
    library = entry["source"].rpartition(", ")[2]
    if library.startswith("python ") and library != PYTHON:
        pytest.skip(f"the line was printed by {library}, this is {PYTHON}")

    assert provoke(description) == ProvokedError(entry["error_type"], entry["text"]), "update the line of the corpus"
