"""Where the simulator's luck comes from: hypothesis, which can then shrink it, or a seeded generator."""

import random
from collections.abc import Sequence
from typing import Protocol, TypeVar

from hypothesis import strategies as st

Option = TypeVar("Option")

DRAWS = 600  # of one history; what comes later is calm, because hypothesis has an end to its patience


class Choices(Protocol):
    """Decides. What is calm comes first, so that shrinking makes histories calmer."""

    def number(self, below: int) -> int:
        """A number from 0."""

    def pick(self, options: Sequence[Option]) -> Option:
        """One of them."""

    def chance(self, percent: float) -> bool:
        """Whether something with this probability happens."""

    def check(self) -> None:
        """Raises if the source wants the history to be given up."""


class _Choices:
    def number(self, below: int) -> int:
        raise NotImplementedError

    def pick(self, options: Sequence[Option]) -> Option:
        return options[self.number(len(options))]

    def chance(self, percent: float) -> bool:
        return percent > 0 and self.number(1000) >= 1000 - 10 * percent

    def check(self) -> None:
        """Nothing is wrong with most sources."""


class DrawnChoices(_Choices):
    """From hypothesis."""

    def __init__(self, data: st.DataObject) -> None:
        self._data = data
        self._left = DRAWS
        self._stop: BaseException | None = None

    def number(self, below: int) -> int:
        """Drawn, as long as there are draws left."""
        if self._left == 0 or below < 2:
            return 0
        self._left -= 1
        try:
            drawn: int = self._data.conjecture_data.draw_integer(0, below - 1)
        except BaseException as stop:  # an event loop would swallow what hypothesis means for the test's own frame
            self._stop, self._left = stop, 0
            return 0
        return drawn

    def check(self) -> None:
        """Raises what hypothesis raised."""
        if self._stop is not None:
            raise self._stop


class SeededChoices(_Choices):
    """From a seed, without end."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def number(self, below: int) -> int:
        """The generator's next."""
        return self._random.randrange(below)
