"""Random choices of the simulator: drawn from a seed, or replayed from a recorded list that can be shrunk."""

import random
from collections.abc import Callable, Sequence
from typing import TypeVar

Option = TypeVar("Option")


class Choices:
    """A source of choices; smaller numbers mean fewer and milder faults, so that shrinking simplifies a history."""

    def number(self, below: int) -> int:
        """Return a number from 0 up to, but not including, `below`."""
        raise NotImplementedError

    def pick(self, options: Sequence[Option]) -> Option:
        """Return one of the options."""
        return options[self.number(len(options))]

    def chance(self, percent: float) -> bool:
        """Return True with the given probability, in percent."""
        return percent > 0 and self.number(1000) >= 1000 - 10 * percent


class SeededChoices(Choices):
    """Unlimited choices drawn from a seed; `drawn` records them."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self.drawn: list[int] = []

    def number(self, below: int) -> int:
        """Draw the next number from the random generator and record it."""
        number = int(self._random.random() * below)
        self.drawn.append(number)
        return number


class ReplayedChoices(Choices):
    """Recorded choices, followed by zeros."""

    def __init__(self, drawn: Sequence[int]) -> None:
        self._recorded = iter(drawn)

    def number(self, below: int) -> int:
        """Return the next recorded number, or the largest one allowed if it is smaller."""
        return min(next(self._recorded, 0), below - 1)


def shrink(drawn: list[int], fails: Callable[[list[int]], bool], *, tries: int) -> list[int]:
    """Return shorter lists of smaller choices that still fail.

    Removes runs of choices or sets them to 0, longer runs first, in at most `tries` runs of `fails`.
    """
    size = len(drawn)
    while size:
        start = 0
        while start < len(drawn) and tries > 0:
            prefix, suffix = drawn[:start], drawn[start + size :]
            zeroed = [*prefix, *(0 for _ in drawn[start : start + size]), *suffix]
            for candidate in ([*prefix, *suffix], zeroed):
                tries -= 1
                if candidate != drawn and fails(candidate):
                    drawn = candidate
                    break
            else:
                start += size
        size //= 2
    return drawn
