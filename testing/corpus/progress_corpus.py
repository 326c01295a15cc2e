"""Corpus of the output of training programs, with the progress at its end.

`origin` of a record in progress.jsonl is how its output was made: captured from a run with the named versions, or
printed by the statements of a program whose training needs a GPU.
"""

import json
from dataclasses import dataclass
from pathlib import Path

from finetune_supervisor.messages import TrainingProgress

_FILE = Path(__file__).parent / "progress.jsonl"


@dataclass(frozen=True)
class ProgramOutput:
    """Output of a program, and the progress that it contains last."""

    name: str
    output: bytes
    expected: TrainingProgress


def read_program_outputs() -> tuple[ProgramOutput, ...]:
    """Return all records of the corpus."""
    records = [json.loads(line) for line in _FILE.read_text(encoding="utf-8").splitlines()]
    return tuple(
        ProgramOutput(record["name"], record["output"].encode(), TrainingProgress(**record["expected"]))
        for record in records
    )
