"""Where the simulator's luck comes from: a seeded generator, or what was chosen once, made calmer bit by bit."""

import random
from collections.abc import Callable, Sequence
from typing import TypeVar

Option = TypeVar("Option")


class Choices:
    """Decides. What is calm comes first, so that smaller numbers make histories calmer."""

    def number(self, below: int) -> int:
        """A number from 0."""
        raise NotImplementedError

    def pick(self, options: Sequence[Option]) -> Option:
        """One of them."""
        return options[self.number(len(options))]

    def chance(self, percent: float) -> bool:
        """Whether something with this probability happens."""
        return percent > 0 and self.number(1000) >= 1000 - 10 * percent


class SeededChoices(Choices):
    """From a seed, without end; `made` is what was chosen."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self.made: list[int] = []

    def number(self, below: int) -> int:
        """The generator's next."""
        number = int(self._random.random() * below)
        self.made.append(number)
        return number


class RepeatedChoices(Choices):
    """What was chosen before, and calm after that."""

    def __init__(self, made: Sequence[int]) -> None:
        self._made = iter(made)

    def number(self, below: int) -> int:
        """The next of them that still fits."""
        return min(next(self._made, 0), below - 1)


def shrink(made: list[int], fails: Callable[[list[int]], bool], *, tries: int) -> list[int]:
    """Shorter and calmer choices that still fail: runs of them are left out or made 0, longer runs first."""
    size = len(made)
    while size:
        at = 0
        while at < len(made) and tries > 0:
            before, after = made[:at], made[at + size :]
            calmer = [*before, *(0 for _ in made[at : at + size]), *after]
            for candidate in ([*before, *after], calmer):
                tries -= 1
                if candidate != made and fails(candidate):
                    made = candidate
                    break
            else:
                at += size
        size //= 2
    return made
