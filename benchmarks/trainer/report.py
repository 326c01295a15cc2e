"""Formats the results of a comparison: tokens per second, and the speed of ours relative to each peer."""

from collections.abc import Iterator, Sequence
from statistics import median

from benchmarks.trainer.comparison import OURS, BenchmarkCase, ContenderResult, ContenderResults

GIB = 2**30


def describe_case(case: BenchmarkCase, results: ContenderResults, *, peak_flops: float | None = None) -> Iterator[str]:
    """Yield a line per contender. Speedups compare trainings of the same round; above 1 ours is faster."""
    ours = results[OURS]
    yield f"{case.title}: {case.content.samples} rows, {case.content.tokens} tokens an epoch"
    for name, result in results.items():
        if result.error:
            yield f"  {name:<10} {result.error}"
            continue
        parts = [f"{case.content.tokens / result.seconds:>9.0f} tokens/s"]
        parts += [f"{case.content.samples / result.seconds:>7.2f} samples/s"]
        if peak_flops:
            parts += [f"mfu {case.content.flops / result.seconds / peak_flops:.1%}"]
        if peak := max(measurement.peak_bytes for measurement in result.measurements):
            parts += [f"peak {peak / GIB:.1f} GiB"]
        if name == OURS and (forecast := case.content.forecast_bytes):
            parts += [f"forecast {forecast / GIB:.1f} GiB"]
        if name != OURS and not ours.error:
            parts += [f"ours/{name}: {median_and_range(speedups(ours, result))}"]
            parts += [f"by CPU time {median_and_range(speedups(ours, result, cpu=True))}"] if not peak_flops else []
        yield f"  {name:<10} {'   '.join(parts)}"


def speedups(ours: ContenderResult, peer: ContenderResult, *, cpu: bool = False) -> list[float]:
    """Return the speedup of ours in each round."""
    name = "cpu_seconds" if cpu else "seconds"
    return [
        getattr(peer_measurement, name) / getattr(ours_measurement, name)
        for ours_measurement, peer_measurement in zip(ours.measurements, peer.measurements, strict=True)
    ]


def median_and_range(values: Sequence[float]) -> str:
    return f"{median(values):.2f} ({min(values):.2f} to {max(values):.2f})"
