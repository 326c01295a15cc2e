"""Provoke the errors of the corpus again and store what the installed libraries print.

Run `PYTHONPATH=operator:trainer:tools:. python -m testing.corpus.provoke` after an upgrade of a library.
"""

import json
from pathlib import Path

from testing.corpus.error_corpus import FAILURE_FILES
from testing.corpus.provoke.runner import installed_version, parse_source, provoke


def update_file(path: Path) -> None:
    """Replace the texts of the entries that can be provoked and print the changed ones."""
    entries = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    for entry in entries:
        source = parse_source(entry["source"])
        if source is None:
            continue
        error = provoke(source.description)
        version = installed_version(source.library)
        changes = {
            "text": error.text,
            "error_type": error.error_type,
            "source": f"provoked: {source.description}, {source.library} {version}",
        }
        if entry | changes != entry:
            print(f"{path.name}: {source.description}: {error.text[:120]!r}")
            entry.update(changes)
    lines = (json.dumps(entry, ensure_ascii=False) + "\n" for entry in entries)
    path.write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    for path in FAILURE_FILES:
        update_file(path)
