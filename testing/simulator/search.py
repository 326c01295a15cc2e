"""Searches for histories that violate an invariant, and shrinks counterexamples."""

import gc
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from testing.simulator.history import HistoryResult, run_history
from testing.simulator.scenarios import SCENARIO_KINDS, DrawScenario
from testing.simulator.world.choices import ReplayedChoices, SeededChoices, shrink

MAX_SHRINK_RUNS = 400


@dataclass(frozen=True)
class Counterexample:
    """A history that violates an invariant."""

    kind: str
    seed: int
    recorded_choices: tuple[int, ...]


@dataclass
class SearchResult:
    """The first counterexample, if any, and a count of the final phases."""

    counterexample: Counterexample | None = None
    phases: Counter[str] = field(default_factory=Counter)


def search(kind: str, seeds: Iterable[int]) -> SearchResult:
    """Run one history of this kind per seed until one violates an invariant."""
    search_result = SearchResult()
    for seed in seeds:
        choices = SeededChoices(seed)
        result = run_history(SCENARIO_KINDS[kind](choices), choices)
        search_result.phases[result.phase] += 1
        if result.violations:
            search_result.counterexample = Counterexample(kind, seed, tuple(choices.drawn))
            break
    return search_result


def reduce_garbage_collection() -> None:
    """Collect garbage less often, and ignore the imported modules, because histories are short."""
    gc.freeze()
    gc.set_threshold(50_000)


def explain(counterexample: Counterexample | None) -> str:
    """Shrink a counterexample and return its violations and trace as text."""
    if counterexample is None:
        return "no invariant was violated"
    draw = SCENARIO_KINDS[counterexample.kind]
    shrunk = shrink(
        list(counterexample.recorded_choices),
        lambda choices: bool(_replay(draw, choices).violations),
        max_runs=MAX_SHRINK_RUNS,
    )
    result = _replay(draw, shrunk)
    return "\n".join(
        (f"{counterexample.kind}, seed {counterexample.seed}:", *result.violations, "trace:", *result.trace)
    )


def _replay(draw_scenario: DrawScenario, recorded_choices: Sequence[int]) -> HistoryResult:
    choices = ReplayedChoices(recorded_choices)
    return run_history(draw_scenario(choices), choices)
