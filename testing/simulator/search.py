"""The search for a history in which a promise is broken, seed after seed; what is found is made as calm as it gets."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from testing.simulator.history import Story, play
from testing.simulator.scenarios import KINDS, Draw
from testing.simulator.world.choices import RepeatedChoices, SeededChoices, shrink

SHRINKING_TRIES = 400


@dataclass(frozen=True)
class Finding:
    """A history with something wrong in it."""

    kind: str
    seed: int
    made: tuple[int, ...]  # the choices that led to it


@dataclass
class Found:
    """What a search saw; `phases` are the ends of its histories."""

    finding: Finding | None = None
    phases: Counter[str] = field(default_factory=Counter)


def search(kind: str, seeds: Iterable[int]) -> Found:
    """Every history of one kind, until one has something wrong."""
    found = Found()
    for seed in seeds:
        choices = SeededChoices(seed)
        story = play(KINDS[kind](choices), choices)
        found.phases[story.phase] += 1
        if story.violations:
            found.finding = Finding(kind, seed, tuple(choices.made))
            break
    return found


def explain(finding: Finding | None) -> str:
    """The calmest history that is known to have something wrong, too."""
    if finding is None:
        return "nothing is wrong"
    draw = KINDS[finding.kind]
    calmest = shrink(list(finding.made), lambda made: bool(_repeat(draw, made).violations), tries=SHRINKING_TRIES)
    story = _repeat(draw, calmest)
    return "\n".join((f"{finding.kind}, seed {finding.seed}:", *story.violations, "what happened:", *story.trace))


def _repeat(draw: Draw, made: Sequence[int]) -> Story:
    choices = RepeatedChoices(made)
    return play(draw(choices), choices)
