"""What becomes of each row: kept, cut, dropped or skipped; counted, and the first of each kind named."""

from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from finetune_trainer.data.chat_template import Sample
from finetune_trainer.errors import DatasetError, TrainerError

_NAMED = 10  # rows that a message names

Rendered = tuple[Sample, ...]  # one sequence, or the chosen and the rejected one of a pair


@dataclass(frozen=True)
class Rules:
    """What to do with rows that are too long or cannot be used."""

    max_length: int | None = None
    overlong: Literal["drop", "truncate", "error"] = "drop"
    on_bad_row: Literal["error", "skip"] = "error"


@dataclass(frozen=True)
class Named:
    """How many rows, and the names of the first few."""

    count: int = 0
    first: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return self.count > 0

    def __str__(self) -> str:
        more = (f"and {self.count - len(self.first)} more",) if self.count > len(self.first) else ()
        return ", ".join((*self.first, *more))

    def plus(self, name: str) -> "Named":
        return Named(self.count + 1, (*self.first, name) if len(self.first) < _NAMED else self.first)


@dataclass(frozen=True)
class Counted:
    """What became of the rows that were read."""

    rows: int = 0
    kept: int = 0
    too_long: Named = field(default=Named())  # and left out; each with its length
    cut: Named = field(default=Named())  # kept without their end; each with its length before
    nothing_to_learn: Named = field(default=Named())
    bad: Named = field(default=Named())  # each with what is wrong with it

    @classmethod
    def from_json(cls, raw: dict[str, Any]) -> "Counted":
        named = {
            name: Named(value["count"], tuple(value["first"])) for name, value in raw.items() if isinstance(value, dict)
        }
        return cls(**{**raw, **named})

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


class Sieve:
    """Applies the rules to one row after the other, and counts."""

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self.counted = Counted()

    def keep(self, row: Rendered | TrainerError) -> Rendered | None:
        """The row as it will be trained on, or None. Raises where the rules say so."""
        counted = self.counted = replace(self.counted, rows=self.counted.rows + 1)
        if isinstance(row, TrainerError):
            if self._rules.on_bad_row == "error":
                raise row
            self.counted = replace(counted, bad=counted.bad.plus(str(row)))
            return None
        place, longest = row[0].place, max(len(sample.tokens) for sample in row)
        if not _all_learn(row):
            self.counted = replace(counted, nothing_to_learn=counted.nothing_to_learn.plus(place))
            return None
        if self._rules.max_length is not None and longest > self._rules.max_length:
            return self._shorten(row, f"{place} ({longest})")
        self.counted = replace(counted, kept=counted.kept + 1)
        return row

    def _shorten(self, row: Rendered, named: str) -> Rendered | None:
        limit, counted = self._rules.max_length, self.counted
        if self._rules.overlong == "error":
            raise DatasetError(
                f"{row[0].place}: {max(len(sample.tokens) for sample in row)} tokens, more than the {limit} of"
                " spec.dataset.maxLength; raise it, shorten the row, or set overlong to drop or truncate"
            )
        assert limit is not None  # else nothing is too long
        beginning = tuple(sample.beginning(limit) for sample in row)
        if self._rules.overlong == "drop" or not _all_learn(beginning):
            self.counted = replace(counted, too_long=counted.too_long.plus(named))
            return None
        self.counted = replace(counted, kept=counted.kept + 1, cut=counted.cut.plus(named))
        return beginning


def _all_learn(row: Rendered) -> bool:
    return all(any(sample.weights) for sample in row)
