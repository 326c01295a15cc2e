"""Compares the log and the result of a training with those of the reference, within bounds per quantity and dtype."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from testing.reference.combination import Combination
from testing.reference.families import FAMILIES
from testing.reference.launch import TrainerRun
from testing.reference.model import compute_probe_logits, load_result
from testing.reference.record import find_order_problems
from testing.reference.training import ReferenceOutcome, ReferenceTraining, list_usable_rows


@dataclass(frozen=True)
class Bound:
    """Largest relative difference of a quantity; `floor` is the smallest denominator."""

    relative: float
    floor: float


# In float32, sums in another order differ by about 1e-6 of a loss. AdamW divides gradients by their size, which
# enlarges the differences of small ones in the following steps. Rates and epochs are computed in float64 on both sides.
FLOAT32: Mapping[str, Bound] = {
    "loss": Bound(2e-4, 0.01),
    "pair_loss": Bound(2e-4, 0.01),
    "grad_norm": Bound(2e-4, 0.01),
    "rewards": Bound(2e-4, 0.5),
    "logps": Bound(2e-4, 0.5),
    "learning_rate": Bound(1e-12, 1e-12),
    "epoch": Bound(1e-12, 1.0),
    "logits": Bound(2e-5, 0.0),
}
# bfloat16 has 8 significant bits: each matrix product is rounded to 0.4 %, and the roundings of a row and of a batch of
# rows differ. A gradient that rounding dominates has any sign, so that the weights of Adam differ by its rate. Rewards
# are differences of log-probabilities of several hundred, and the loss of a pair changes as its rewards.
BFLOAT16: Mapping[str, Bound] = {
    **FLOAT32,
    "loss": Bound(2e-3, 0.5),
    "pair_loss": Bound(0.1, 0.5),
    "grad_norm": Bound(0.02, 0.1),
    "rewards": Bound(0.1, 0.5),
    "logps": Bound(2e-3, 0.5),
    "logits": Bound(0.05, 0.0),
}
BOUNDS = {"float32": FLOAT32, "bfloat16": BFLOAT16}


@dataclass(frozen=True)
class Comparison:
    """Relative difference of one value of the trainer from that of the reference, and its bound."""

    quantity: str
    place: str
    found: float
    expected: float
    relative: float
    bound: float

    @property
    def is_different(self) -> bool:
        """Whether the difference exceeds the bound; a value that is not finite always does."""
        return not self.relative <= self.bound

    def __str__(self) -> str:
        values = f"{self.found:.8g}, expected {self.expected:.8g}"
        return f"{self.quantity} at {self.place}: {values} (difference {self.relative:.1e}, bound {self.bound:.1e})"


@dataclass(frozen=True)
class Report:
    """Comparisons of a combination, and what is wrong with its rows and tokens, or the error that ended it."""

    options: Combination
    comparisons: tuple[Comparison, ...] = ()
    problems: tuple[str, ...] = ()

    @property
    def differences(self) -> list[str]:
        """Everything that differs, largest first."""
        different = sorted((each for each in self.comparisons if each.is_different), key=lambda each: -each.relative)
        return [*self.problems, *map(str, different)]


def check(run: TrainerRun) -> Report:
    """Train the combination by definition, and compare; what cannot be trained or loaded is a problem."""
    if run.error or run.record is None:
        return Report(run.options, problems=(run.error or "no record",))
    usable = set(list_usable_rows(run.options, run.files))
    problems = list(find_order_problems(run.record, run.options, run.files, usable))
    try:
        outcome = ReferenceTraining(run.options, run.record, run.files, run.initial_adapter).run()
        comparisons = (*_compare_logs(run, outcome), *_compare_logits(run, outcome))
    except Exception as error:  # of a library, for example because the adapters have other modules
        return Report(run.options, problems=(*problems, f"{type(error).__name__} in the reference: {error}"))
    return Report(run.options, comparisons, (*problems, *outcome.problems))


def _compare_logs(run: TrainerRun, outcome: ReferenceOutcome) -> Iterator[Comparison]:
    steps = {int(entry["step"]): entry for entry in run.log if "loss" in entry}
    for number, expected in enumerate(outcome.steps, start=1):
        yield from _compare_entry(steps.get(number, {}), expected, f"step {number}", run.options)
    evaluation: dict[str, float] = next((entry for entry in reversed(run.log) if "eval_loss" in entry), {})
    yield from _compare_entry(evaluation, outcome.evaluation, "the evaluation", run.options)


def _compare_entry(
    found: Mapping[str, Any], expected: Mapping[str, float], place: str, options: Combination
) -> Iterator[Comparison]:
    for name, value in expected.items():
        quantity = name.removeprefix("eval_").partition("/")[0]
        if quantity == "ties":
            continue
        bound = BOUNDS[options.dtype]["pair_loss" if options.is_dpo and quantity == "loss" else quantity]
        actual = float(found.get(name, float("nan")))
        relative = abs(actual - value) / max(abs(value), bound.floor)
        if name.endswith("accuracies"):  # rounding decides ties
            relative = max(0.0, abs(actual - value) - expected[name.replace("rewards/accuracies", "ties")])
        # Before the first update, the policy and the reference model compute the same, unless in other micro-batches.
        # Some other types, such as doge, use another kernel of attention where a gradient is needed.
        is_exact = quantity == "rewards" and value == 0 and not options.precompute and options.family in FAMILIES
        yield Comparison(name, place, actual, value, relative, 0.0 if is_exact else bound.relative)


def _compare_logits(run: TrainerRun, outcome: ReferenceOutcome) -> Iterator[Comparison]:
    """Compare the logits of the published files, loaded by plain libraries."""
    bound = BOUNDS[run.options.dtype]["logits"]
    result = run.folder / "result"
    for folder in (result, result / "merged") if run.options.merge else (result,):
        logits = compute_probe_logits(load_result(folder, run.files.model))
        worst = int((logits - outcome.logits).abs().argmax())
        largest = float(outcome.logits.abs().max())
        found, expected = float(logits.flatten()[worst]), float(outcome.logits.flatten()[worst])
        relative, place = abs(found - expected) / largest, str(folder.relative_to(run.folder))
        yield Comparison("logits", place, found, expected, relative, bound.relative)


def find_largest(reports: Iterable[Report]) -> dict[str, float]:
    """Return the largest relative difference of each quantity."""
    largest: dict[str, float] = {}
    for report in reports:
        for each in report.comparisons:
            largest[each.quantity] = max(largest.get(each.quantity, 0.0), each.relative)
    return largest
