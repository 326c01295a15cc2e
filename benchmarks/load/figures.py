"""Computes the figures of a turn: medians, percentiles, CPU time and requests per job."""

from __future__ import annotations

import math
import statistics

from benchmarks.load.turn import TIME_LIMIT_SECONDS, LoadSize, TurnResult
from benchmarks.load.usage import CLUSTER_PROGRAMS, CONTROLLERS
from benchmarks.table import compute_percentile


def summarise_turn(result: TurnResult, size: LoadSize) -> dict[str, float]:
    """Return the figures of a turn by title, in seconds unless the title contains a unit; NaN is a missing value."""
    median_created = statistics.median(job.created for job in result.single_launches)
    median_running = statistics.median(job.running for job in result.single_restarts)
    return {
        f"one job of {size.nodes} nodes, pods created": median_created,
        "one job, next attempt running after a failure": median_running,
        **summarise_bursts(result, size),
        **summarise_cpu_seconds(result),
        "memory of the controllers, MiB": result.memory_mib or math.nan,
        "API requests per job, launch": result.launch.usage.api_requests / size.jobs,
        "API requests per job, restart": result.restart.usage.api_requests / size.jobs,
    }


def summarise_bursts(result: TurnResult, size: LoadSize) -> dict[str, float]:
    """Return the percentiles of the durations of both bursts, and how many jobs took too long."""
    burst = f"{size.jobs} x {size.nodes}"
    figures: dict[str, float] = {}
    for title, durations in (
        (f"launch of {burst}, pods created", [job.created for job in result.launch.durations]),
        (f"launch of {burst}, all running", [job.running for job in result.launch.durations]),
        (f"restart of {burst}, all running", [job.running for job in result.restart.durations]),
    ):
        figures |= {f"{title}, p50": statistics.median(durations), f"{title}, p99": compute_percentile(durations, 99)}
    for title, burst_result in (("launch", result.launch), ("restart", result.restart)):
        late_jobs = sum(job.running >= TIME_LIMIT_SECONDS for job in burst_result.durations)
        figures[f"{title}: jobs not running after {TIME_LIMIT_SECONDS:.0f} s"] = late_jobs
    return figures


def summarise_cpu_seconds(result: TurnResult) -> dict[str, float]:
    """Return the CPU seconds of both bursts together by program."""
    launch, restart = result.launch.usage.cpu_seconds, result.restart.usage.cpu_seconds
    seconds = {name: launch[name] + restart[name] for name in launch}
    programs = (CONTROLLERS, *CLUSTER_PROGRAMS)
    # the pods of a TrainJob are created by the Job controller, which is a part of kube-controller-manager
    all_controllers = seconds.get(CONTROLLERS, math.nan) + seconds["kube-controller-manager"]
    return {
        **{f"CPU of both bursts, {name}": seconds.get(name, math.nan) for name in programs},
        "CPU of both bursts, controllers and kube-controller-manager": all_controllers,
        "CPU of both bursts, all programs": sum(seconds.values()),
    }
