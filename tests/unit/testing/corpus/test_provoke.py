"""Tests that the provoked lines of the corpus are what the installed libraries print."""

import json
import sys
from typing import Any

import pytest

from testing.corpus.error_corpus import FAILURE_FILES
from testing.corpus.provoke.runner import PROVOCATIONS, ProvokedError, installed_version, parse_source, provoke

ENTRIES: dict[str, dict[str, Any]] = {}
for path in FAILURE_FILES:
    for line in path.read_text(encoding="utf-8").splitlines():
        entry = json.loads(line)
        if source := parse_source(entry["source"]):
            assert source.description not in ENTRIES, f"two lines are provoked by {source.description!r}"
            ENTRIES[source.description] = entry


def test_every_provocation_belongs_to_a_line() -> None:
    assert PROVOCATIONS.keys() == ENTRIES.keys()


@pytest.mark.parametrize("description", PROVOCATIONS)
def test_line_is_what_the_installed_library_prints(description: str) -> None:
    entry = ENTRIES[description]
    source = parse_source(entry["source"])
    assert source is not None
    if source.library == "python" and source.version != installed_version("python"):
        pytest.skip(f"the line was printed by Python {source.version}, this is {sys.version}")

    assert source.version == installed_version(source.library), "run python -m testing.corpus.provoke"
    assert provoke(description) == ProvokedError(entry["error_type"], entry["text"])
