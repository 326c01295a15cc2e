"""Formats the results of a comparison: throughput, and the speedup of our trainer over each peer."""

from collections.abc import Iterator, Sequence
from statistics import median

from benchmarks.trainer.comparison import OURS, BenchmarkCase, ContenderResult, ResultsByContender
from benchmarks.trainer.task import MemoryForecast

MIB, GIB = 2**20, 2**30


def describe_case(
    case: BenchmarkCase, results: ResultsByContender, *, peak_flops: float | None = None
) -> Iterator[str]:
    """Yield a title line and one line per contender.

    A speedup above 1 means that our trainer was faster in the same round.
    """
    ours = results[OURS]
    yield f"{case.title}: {case.content.samples} rows, {case.content.tokens} tokens an epoch"
    for name, result in results.items():
        if result.error:
            yield f"  {name:<10} {result.error}"
            continue
        columns = [f"{case.content.tokens / result.seconds:>9.0f} tokens/s"]
        columns += [f"{case.content.samples / result.seconds:>7.2f} samples/s"]
        if peak_flops:
            columns += [f"mfu {case.content.flops / result.seconds / peak_flops:.1%}"]
        columns += describe_memory(result, case.content.forecast if name == OURS else None)
        columns += [f"tensors {result.tensor_bytes / MIB:.0f} MiB"] if result.tensor_bytes else []
        if name != OURS and not ours.error:
            columns += [f"ours/{name}: {format_median_and_range(compute_speedups(ours, result))}"]
            columns += (
                [f"by CPU time {format_median_and_range(compute_speedups(ours, result, use_cpu_time=True))}"]
                if not peak_flops
                else []
            )
        yield f"  {name:<10} {'   '.join(columns)}"
        if attention := result.measurements[-1].attention:
            yield f"  {'':<10} attention kernels: {attention}"


def describe_memory(result: ContenderResult, forecast: MemoryForecast | None) -> list[str]:
    """Return the peaks of torch's counters, each with the forecast of the same quantity."""
    peaks = {
        "peak": max(measurement.peak_bytes for measurement in result.measurements),
        "reserved": max(measurement.reserved_bytes for measurement in result.measurements),
    }
    if forecast is None:
        return [f"{name} {size / GIB:.1f} GiB" for name, size in peaks.items() if size]
    if not peaks["peak"]:
        return [f"forecast {forecast.total / GIB:.1f} GiB"]
    forecasts = {"peak": forecast.allocated, "reserved": forecast.reserved}
    return [f"{name} {size / GIB:.1f} of {forecasts[name] / GIB:.1f} GiB forecast" for name, size in peaks.items()]


def compute_speedups(ours: ContenderResult, peer: ContenderResult, *, use_cpu_time: bool = False) -> list[float]:
    """Return the speedup of our trainer over a peer in each round."""
    field = "cpu_seconds" if use_cpu_time else "seconds"
    return [
        getattr(peer_measurement, field) / getattr(ours_measurement, field)
        for ours_measurement, peer_measurement in zip(ours.measurements, peer.measurements, strict=True)
    ]


def format_median_and_range(values: Sequence[float]) -> str:
    return f"{median(values):.2f} ({min(values):.2f} to {max(values):.2f})"
