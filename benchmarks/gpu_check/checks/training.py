"""Trains a model of published shape for two epochs, beside TRL in the same run, and compares memory with forecasts."""

import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_check.context import CheckContext, require
from benchmarks.trainer.cases import GPU_CASES, CaseSettings, prepare_case, shrink_case
from benchmarks.trainer.comparison import OURS, BenchmarkCase, Contender, ContenderResult, run_rounds
from benchmarks.trainer.report import describe_case
from benchmarks.trainer.task import MemoryForecast
from finetune_trainer.metrics.flops import peak_flops

# numbers of rows and of accumulation steps that keep an epoch under half a minute
_SHORTENED: dict[str, dict[str, Any]] = {
    "LoRA SFT 7B, packed to 4096": {"rows": 128, "accumulation_steps": 2},
    "LoRA SFT 7B, 4096": {"rows": 64, "accumulation_steps": 2},
    "LoRA DPO 7B, 2048": {"rows": 24, "accumulation_steps": 2},
    "LoRA SFT Qwen2-VL-7B, 768 image tokens": {"rows": 24, "accumulation_steps": 2},
    "full SFT 3B, 2048": {"rows": 32, "accumulation_steps": 2},
    "QLoRA SFT 7B, packs of 4096": {"rows": 48, "accumulation_steps": 2},
}
GIB = 2**30


def check_training(context: CheckContext, title: str, mode: str = "") -> None:
    """Run a case of `make bench-gpu` with fewer rows; mode `peer`: run TRL, too."""
    settings = choose_settings(title, small=context.small)
    case = prepare_case(settings, context.scratch / title.replace(" ", "-"), context.settings, models=context.models)
    contenders = {
        name: Contender(name, Path(sys.executable), threads=torch.get_num_threads(), log_folder=context.logs)
        for name in ((OURS, "TRL") if mode == "peer" else (OURS,))
    }
    results = run_rounds(case, contenders, rounds=1, restart_processes=True)
    peak = peak_flops(torch.cuda.get_device_name(), torch.bfloat16) if context.on_gpu else None
    print("\n".join(describe_case(case, results, peak_flops=peak)), flush=True)
    for name, result in results.items():
        context.record(**{name: summarise_result(case, result, peak_flops=peak)})
    require(not results[OURS].error, f"{title}: {results[OURS].error}")
    measurement = results[OURS].measurements[0]
    require(measurement.losses and all(map(math.isfinite, measurement.losses)), f"losses {measurement.losses}")
    if case.content.forecast:
        forecast = case.content.forecast
        context.record(forecast_gib=to_gib(forecast))
        if context.on_gpu:
            require_peak_within_forecast(measurement.peak_bytes, measurement.reserved_bytes, forecast)


def choose_settings(title: str, *, small: bool) -> CaseSettings:
    (settings,) = (case for case in GPU_CASES if case.title == title)
    return shrink_case(settings) if small else replace(settings, **_SHORTENED[title])


def summarise_result(case: BenchmarkCase, result: ContenderResult, *, peak_flops: float | None) -> dict[str, Any]:
    """Return throughput, memory and kernels of a contender, or its error."""
    if result.error:
        return {"error": result.error}
    measurement, seconds = result.measurements[0], result.seconds
    gpu_values: dict[str, Any] = {}
    if peak_flops:
        gpu_values = {
            "mfu": case.content.flops / seconds / peak_flops,
            "peak_gib": measurement.peak_bytes / GIB,
            "reserved_gib": measurement.reserved_bytes / GIB,
        }
    return {
        "tokens_per_second": case.content.tokens / seconds,
        "steps": measurement.steps,
        **gpu_values,
        "losses": [measurement.losses[0], measurement.losses[-1]] if measurement.losses else [],
        "attention": measurement.attention,
    }


def require_peak_within_forecast(peak_bytes: int, reserved_bytes: int, forecast: MemoryForecast) -> None:
    """Compare each of torch's counters with the forecast of the same quantity. Raises: CheckFailed."""
    for name, measured, expected in (
        ("tensors", peak_bytes, forecast.allocated),
        ("reserved memory", reserved_bytes, forecast.reserved),
    ):
        require(measured <= expected, f"{name}: {measured / GIB:.2f} GiB, forecast at most {expected / GIB:.2f} GiB")


def to_gib(forecast: MemoryForecast) -> dict[str, float]:
    return {
        "total": forecast.total / GIB,
        "allocated": forecast.allocated / GIB,
        "reserved": forecast.reserved / GIB,
    }
