"""Reads which rows the trainer used in each micro-batch, and proves that every epoch uses each row as often as it must.

This record and the initial adapter are all that the reference takes from the trainer.
"""

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from testing.reference.combination import Combination
from testing.reference.job import SPLIT_RATIO, JobFiles
from testing.reference.schedules import count_steps_per_epoch


@dataclass(frozen=True)
class RecordedBatch:
    """Items of a micro-batch of one rank, each with the origins of its rows; fillers have none."""

    items: list[list[str]]
    lengths: list[int]  # tokens of each sequence
    targets: list[int]  # learned tokens of each sequence

    @property
    def origins(self) -> list[str]:
        """Origins of all rows."""
        return [origin for item in self.items for origin in item]


Step = list[list[RecordedBatch]]  # by rank


@dataclass(frozen=True)
class Record:
    """Rows of a training by step, which is numbered from 1, and of its evaluation."""

    items_per_epoch: int
    steps: dict[int, Step]
    evaluation: list[RecordedBatch]

    def continue_with(self, resumed: "Record") -> "Record":
        """Return the record of a training that was interrupted before the first step of the resumed one."""
        earlier = {number: step for number, step in self.steps.items() if number < min(resumed.steps)}
        return Record(resumed.items_per_epoch, earlier | resumed.steps, resumed.evaluation)


def read_record(folder: Path, *, ranks: int) -> Record:
    """Read the files that the ranks wrote."""
    by_rank = [json.loads((folder / f"rows.{rank}.json").read_text()) for rank in range(ranks)]

    def parse(batches: list[dict[str, list]]) -> list[RecordedBatch]:  # type: ignore[type-arg]
        return [RecordedBatch(each["rows"], each["lengths"], each["targets"]) for each in batches]

    steps = {int(number): [parse(each["steps"][number]) for each in by_rank] for number in by_rank[0]["steps"]}
    return Record(
        by_rank[0]["itemsPerEpoch"], steps, [batch for each in by_rank for batch in parse(each["evaluation"])]
    )


@dataclass(frozen=True)
class SourceDraws:
    """How often an epoch uses the rows of a source: each row, and all of them together, at least and at most."""

    rows: frozenset[str]
    per_row: tuple[int, int]
    together: tuple[int, int]


def find_order_problems(record: Record, options: Combination, files: JobFiles, usable: set[str]) -> Iterator[str]:
    """Yield what is wrong with the rows of the steps. usable: origins of the rows that are not left out."""
    held_out = Counter(_list_origins([record.evaluation]))
    if options.evaluation == "split":
        count = len([row for row in usable if str(files.evaluation) not in row])
        expected_count = min(max(1, round(count * SPLIT_RATIO)), count - 1)
        if len(held_out) != expected_count or set(held_out.values()) != {1}:
            yield f"{dict(held_out)} are held out instead of {expected_count} rows"
        usable = usable - held_out.keys()
    elif options.evaluation == "file" and held_out != Counter(row for row in usable if str(files.evaluation) in row):
        yield f"the evaluation uses {dict(held_out)}"
    sources = _expect_draws(options, files, usable)
    first_epoch: Counter[str] | None = None
    steps_per_epoch = count_steps_per_epoch(options, record.items_per_epoch)
    for first in range(1, len(record.steps) + 1, steps_per_epoch):
        steps = [record.steps[number] for number in range(first, first + steps_per_epoch) if number in record.steps]
        used = Counter(origin for step in steps for origin in _list_origins(step))
        is_whole = len(steps) == steps_per_epoch
        problems = (
            *_find_size_problems(steps, options, record.items_per_epoch),
            *_find_draw_problems(used, sources, is_whole),
        )
        yield from (f"epoch from step {first} on: {problem}" for problem in problems)
        if is_whole and used != (first_epoch := first_epoch or used):
            yield f"the epoch from step {first} on uses other rows than the first one"


def _find_size_problems(steps: Sequence[Step], options: Combination, items_per_epoch: int) -> Iterator[str]:
    """Yield the steps of an epoch that have another number of items than the effective batch."""
    left = items_per_epoch
    for step in steps:
        count = len([item for batches in step for batch in batches for item in batch.items if item])
        if count != min(left, options.layout.effective):
            yield f"a step has {count} items, expected {min(left, options.layout.effective)}"
        left -= count


def _find_draw_problems(used: Counter[str], sources: Sequence[SourceDraws], is_whole: bool) -> Iterator[str]:
    """Yield the rows, and the numbers of rows of a source, that differ from what an epoch must use."""
    for source in sources:
        (least, most), (all_least, all_most) = source.per_row, source.together
        total = sum(used[row] for row in source.rows)
        if not (all_least if is_whole else 0) <= total <= all_most:
            yield f"a source has {total} rows, expected {source.together}"
        for row in source.rows:
            if not (least if is_whole else 0) <= used[row] <= most:
                yield f"{row} is used {used[row]} times, expected {source.per_row}"
    if unknown := used.keys() - frozenset().union(*(source.rows for source in sources)):
        yield f"rows are used that are left out: {sorted(unknown)}"


def _expect_draws(options: Combination, files: JobFiles, usable: set[str]) -> list[SourceDraws]:
    """Return how often an epoch uses each row: once, or for name#N so that the numbers differ by at most one."""
    sources = []
    for file, requested in zip(files.sources, options.draws, strict=True):
        lines = len(file.read_text().splitlines())
        count = requested or lines
        least, rest = divmod(count, lines)
        most = least + bool(rest)
        rows = frozenset(f"{file} line {number}" for number in range(1, lines + 1)) & usable
        left_out = lines - len(rows)  # each of these rows is drawn too, but not used
        bounds = (max(len(rows) * least, count - left_out * most), min(len(rows) * most, count - left_out * least))
        sources.append(SourceDraws(rows, (least, most), bounds))
    return sources


def _list_origins(step: Step) -> list[str]:
    return [origin for batches in step for batch in batches for origin in batch.origins]
