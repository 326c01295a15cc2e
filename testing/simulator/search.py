"""Search for a history that violates an invariant, seed after seed; a counterexample is shrunk."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from testing.simulator.history import HistoryResult, run_history
from testing.simulator.scenarios import SCENARIO_KINDS, DrawScenario
from testing.simulator.world.choices import ReplayedChoices, SeededChoices, shrink

SHRINK_TRIES = 400


@dataclass(frozen=True)
class Counterexample:
    """A history that violates an invariant."""

    kind: str
    seed: int
    drawn: tuple[int, ...]  # its choices


@dataclass
class SearchResult:
    """The first counterexample, if any, and the final phases of all histories run."""

    counterexample: Counterexample | None = None
    phases: Counter[str] = field(default_factory=Counter)


def search(kind: str, seeds: Iterable[int]) -> SearchResult:
    """Run the histories of one kind, one for each seed, until one violates an invariant."""
    search_result = SearchResult()
    for seed in seeds:
        choices = SeededChoices(seed)
        result = run_history(SCENARIO_KINDS[kind](choices), choices)
        search_result.phases[result.phase] += 1
        if result.violations:
            search_result.counterexample = Counterexample(kind, seed, tuple(choices.drawn))
            break
    return search_result


def explain(counterexample: Counterexample | None) -> str:
    """Shrink a counterexample and return its violations and its trace."""
    if counterexample is None:
        return "no invariant was violated"
    draw = SCENARIO_KINDS[counterexample.kind]
    shrunk = shrink(list(counterexample.drawn), lambda drawn: bool(_replay(draw, drawn).violations), tries=SHRINK_TRIES)
    result = _replay(draw, shrunk)
    return "\n".join(
        (f"{counterexample.kind}, seed {counterexample.seed}:", *result.violations, "trace:", *result.trace)
    )


def _replay(draw: DrawScenario, drawn: Sequence[int]) -> HistoryResult:
    choices = ReplayedChoices(drawn)
    return run_history(draw(choices), choices)
