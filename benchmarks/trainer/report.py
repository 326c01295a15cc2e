"""What came of a contest, as a table: tokens per second, and how many times as fast ours is."""

from collections.abc import Iterator, Sequence
from statistics import median

from benchmarks.trainer.comparison import OURS, Case, Outcome, Outcomes

GIB = 2**30


def describe_case(case: Case, outcomes: Outcomes, *, peak_flops: float | None = None) -> Iterator[str]:
    """A line per contender. Ratios are of the same round, above 1 where ours is faster."""
    ours = outcomes[OURS]
    yield f"{case.title}: {case.content.samples} rows, {case.content.tokens} tokens an epoch"
    for name, outcome in outcomes.items():
        if outcome.error:
            yield f"  {name:<10} {outcome.error}"
            continue
        facts = [f"{case.content.tokens / outcome.seconds:>9.0f} tokens/s"]
        facts += [f"{case.content.samples / outcome.seconds:>7.2f} samples/s"]
        if peak_flops:
            facts += [f"mfu {case.content.flops / outcome.seconds / peak_flops:.1%}"]
        if peak := max(answer.peak_bytes for answer in outcome.answers):
            facts += [f"peak {peak / GIB:.1f} GiB"]
        if name == OURS and (forecast := case.content.forecast_bytes):
            facts += [f"forecast {forecast / GIB:.1f} GiB"]
        if name != OURS and not ours.error:
            facts += [f"ours/{name}: {spread(ratios(ours, outcome))}"]
            facts += [f"by CPU time {spread(ratios(ours, outcome, cpu=True))}"] if not peak_flops else []
        yield f"  {name:<10} {'   '.join(facts)}"


def ratios(ours: Outcome, peer: Outcome, *, cpu: bool = False) -> list[float]:
    """Round by round."""
    name = "cpu_seconds" if cpu else "seconds"
    return [
        getattr(theirs, name) / getattr(mine, name) for mine, theirs in zip(ours.answers, peer.answers, strict=True)
    ]


def spread(values: Sequence[float]) -> str:
    return f"{median(values):.2f} ({min(values):.2f} to {max(values):.2f})"
