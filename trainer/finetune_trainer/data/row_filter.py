"""Keeps, truncates, drops or skips rows according to the spec, and counts them."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from finetune_trainer.data.row_rendering import RenderedRow
from finetune_trainer.errors import DatasetError, TrainerError

_MAX_EXAMPLES = 10
_MAX_NOTES = 50
_OTHER_NOTES = "other message keys are ignored"


@dataclass(frozen=True)
class RowRules:
    """Rules for rows that are too long or cannot be used."""

    max_length: int | None = None  # in tokens; None means no limit
    overlong: Literal["drop", "truncate", "error"] = "drop"
    on_bad_row: Literal["error", "skip"] = "error"


@dataclass(frozen=True)
class RowExamples:
    """Number of rows with the same filter result, and descriptions of the first ten rows."""

    count: int = 0
    first: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return self.count > 0

    def __str__(self) -> str:
        more = (f"and {self.count - len(self.first)} more",) if self.count > len(self.first) else ()
        return ", ".join((*self.first, *more))

    def with_row(self, description: str) -> "RowExamples":
        """Return a copy that includes one more row."""
        first = (*self.first, description) if len(self.first) < _MAX_EXAMPLES else self.first
        return RowExamples(self.count + 1, first)


@dataclass(frozen=True)
class RowStats:
    """Counts of rows read, kept, truncated, dropped and skipped; the field names are keys in the token cache."""

    rows: int = 0
    kept: int = 0
    too_long: RowExamples = field(default=RowExamples())  # dropped rows, described by origin and length
    cut: RowExamples = field(default=RowExamples())  # truncated rows, described by origin and original length
    nothing_to_learn: RowExamples = field(default=RowExamples())  # dropped rows without target tokens
    bad: RowExamples = field(default=RowExamples())  # skipped rows, described by error message
    notes: dict[str, RowExamples] = field(default_factory=dict)  # rows with ignored parts, by description of the part

    @classmethod
    def from_json(cls, raw: dict[str, Any]) -> "RowStats":
        """Parse the output of `as_json`."""
        examples = {
            name: _parse_examples(value) for name, value in raw.items() if isinstance(value, dict) and name != "notes"
        }
        return cls(**{**raw, **examples, "notes": {note: _parse_examples(rows) for note, rows in raw["notes"].items()}})

    def as_json(self) -> dict[str, Any]:
        """Return the stats as a JSON object."""
        return asdict(self)

    def with_notes(self, notes: Iterable[str], origin: str) -> "RowStats":
        """Return a copy that includes the notes of one more row; the number of distinct notes is limited."""
        counted = dict(self.notes)
        for note in dict.fromkeys(notes):
            key = note if note in counted or len(counted) < _MAX_NOTES else _OTHER_NOTES
            counted[key] = counted.get(key, RowExamples()).with_row(origin)
        return replace(self, notes=counted)


class RowFilter:
    """Applies the row rules and counts kept and rejected rows in `stats`."""

    def __init__(self, rules: RowRules) -> None:
        self._rules = rules
        self.stats = RowStats()

    def apply(self, row: RenderedRow | TrainerError) -> RenderedRow | None:
        """Return the row to train on, or None if it is dropped or skipped.

        Raises: DatasetError or ChatTemplateError for a bad or overlong row, if the rules require it.
        """
        stats = self.stats = replace(self.stats, rows=self.stats.rows + 1)
        if isinstance(row, TrainerError):
            if self._rules.on_bad_row == "error":
                raise row
            self.stats = replace(stats, bad=stats.bad.with_row(str(row)))
            return None
        origin, longest = row[0].origin, max(len(sample.input_ids) for sample in row)
        if notes := [note for sample in row for note in sample.notes]:
            stats = self.stats = stats.with_notes(notes, origin)
        if not _has_targets(row):
            self.stats = replace(stats, nothing_to_learn=stats.nothing_to_learn.with_row(origin))
            return None
        if self._rules.max_length is not None and longest > self._rules.max_length:
            return self._handle_overlong_row(row, f"{origin} ({longest})")
        self.stats = replace(stats, kept=stats.kept + 1)
        return row

    def _handle_overlong_row(self, row: RenderedRow, description: str) -> RenderedRow | None:
        limit, stats = self._rules.max_length, self.stats
        if self._rules.overlong == "error":
            raise DatasetError(
                f"{row[0].origin}: {max(len(sample.input_ids) for sample in row)} tokens, more than the {limit} of"
                " spec.dataset.maxLength; raise it, shorten the row, or set overlong to drop or truncate"
            )
        assert limit is not None  # a row can exceed the limit only if a limit is set
        truncated = tuple(sample.truncate(limit) for sample in row)
        if self._rules.overlong == "drop" or not _has_targets(truncated):
            self.stats = replace(stats, too_long=stats.too_long.with_row(description))
            return None
        self.stats = replace(stats, kept=stats.kept + 1, cut=stats.cut.with_row(description))
        return truncated


def _parse_examples(raw: dict[str, Any]) -> RowExamples:
    return RowExamples(raw["count"], tuple(raw["first"]))


def _has_targets(row: RenderedRow) -> bool:
    """Return whether every sequence of the row has a target token."""
    return all(any(sample.weights) for sample in row)
