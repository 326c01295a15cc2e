"""Random choices of the simulator, drawn from a seed or replayed from a recorded list that can be shrunk."""

import random
from collections.abc import Callable, Sequence
from typing import TypeVar

Option = TypeVar("Option")


class Choices:
    """Source of choices; smaller numbers mean fewer and milder faults, so shrinking simplifies a history."""

    def draw_number(self, upper_bound: int) -> int:
        """Draw a number from 0 to `upper_bound` - 1."""
        raise NotImplementedError

    def pick(self, options: Sequence[Option]) -> Option:
        """Draw one of the options."""
        return options[self.draw_number(len(options))]

    def draw_boolean(self, percent: float) -> bool:
        """Draw a boolean that is True with this probability in percent."""
        return percent > 0 and self.draw_number(1000) >= 1000 - 10 * percent


class SeededChoices(Choices):
    """Choices from a random generator, recorded in `drawn`."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self.drawn: list[int] = []

    def draw_number(self, upper_bound: int) -> int:
        """Draw the next number from the random generator and record it."""
        number = int(self._random.random() * upper_bound)
        self.drawn.append(number)
        return number


class ReplayedChoices(Choices):
    """Choices from a recorded list, followed by zeros."""

    def __init__(self, drawn: Sequence[int]) -> None:
        self._recorded = iter(drawn)

    def draw_number(self, upper_bound: int) -> int:
        """Return the next recorded number, limited to `upper_bound` - 1."""
        return min(next(self._recorded, 0), upper_bound - 1)


def shrink(choices: list[int], is_failing: Callable[[list[int]], bool], *, max_runs: int) -> list[int]:
    """Return a shorter list of smaller choices for which `is_failing` still returns True.

    Removes slices of choices or sets them to 0, longer slices first, and calls `is_failing` at most `max_runs` times.
    """
    size = len(choices)
    while size:
        start = 0
        while start < len(choices) and max_runs > 0:
            prefix, suffix = choices[:start], choices[start + size :]
            zeroed = [*prefix, *(0 for _ in choices[start : start + size]), *suffix]
            for candidate in ([*prefix, *suffix], zeroed):
                max_runs -= 1
                if candidate != choices and is_failing(candidate):
                    choices = candidate
                    break
            else:
                start += size
        size //= 2
    return choices
