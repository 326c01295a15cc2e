"""`python -m finetune_trainer.memory SPEC.json [--gpu NAME]`: print the memory forecast of a job as JSON."""

import argparse
import json
import sys
import tempfile
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetune_trainer.cpu_limit import limit_cpu_seconds
from finetune_trainer.errors import ModelError, TrainerError, UserError
from finetune_trainer.lazy_imports import hide_unused_libraries
from finetune_trainer.memory.gpus import USABLE_BYTES, find_fitting_gpus

if TYPE_CHECKING:
    from finetune_api.v1alpha1.job import TrainerSpec
    from finetune_trainer.memory.breakdown import MemoryBreakdown
    from finetune_trainer.memory.forecast import Forecast, ForecastModel

EXIT_RETRYABLE, EXIT_INVALID_INPUT = 1, 2
# Limits of CPU time, without the imports of libraries: for building the model, which ends a config with huge sizes, and
# for all simulated steps, with room for slow machines.
_MAX_BUILD_SECONDS, _MAX_FORECAST_SECONDS = 15, 60


def main() -> int:
    """Print the forecast; on failure, print an error to stderr and exit with EXIT_RETRYABLE or EXIT_INVALID_INPUT."""
    parser = argparse.ArgumentParser(prog="python -m finetune_trainer.memory", description=__doc__)
    parser.add_argument("spec", type=Path, help="the spec of a job, as JSON")
    parser.add_argument("--gpu", metavar="NAME", help=f"one of {', '.join(USABLE_BYTES)}")
    options = parser.parse_args()
    if options.gpu is not None and options.gpu not in USABLE_BYTES:
        print(f"--gpu {options.gpu}: unknown GPU; expected one of {', '.join(USABLE_BYTES)}", file=sys.stderr)
        return EXIT_INVALID_INPUT
    try:
        print(json.dumps(build_forecast_report(options.spec, options.gpu)))
    except TrainerError as error:
        print(error, file=sys.stderr)
        return EXIT_INVALID_INPUT if isinstance(error, UserError) else EXIT_RETRYABLE
    return 0


def build_forecast_report(spec_file: Path, gpu: str | None) -> dict[str, Any]:
    """Return the report: memory parts in bytes, whether they fit into the GPU, and a suggestion if they do not."""
    hide_unused_libraries(spec_file)
    from finetune_trainer.memory.forecast import read_model
    from finetune_trainer.memory.model_shape import Architecture
    from finetune_trainer.model.download import download_description
    from finetune_trainer.read_spec import read_spec

    spec = read_spec(spec_file)
    with tempfile.TemporaryDirectory() as folder, _limit_cpu_seconds("building the model of", _MAX_BUILD_SECONDS):
        source = download_description(spec.model, Path(folder))
        model = read_model(spec.model_copy(update={"model": source}))
        Architecture(model.config, model.dtype, None).build()
    with _limit_cpu_seconds("simulating steps of the model of", _MAX_FORECAST_SECONDS):
        return _build_report(spec, model, gpu)


def _limit_cpu_seconds(phase: str, seconds: int) -> AbstractContextManager[None]:
    return limit_cpu_seconds(
        seconds, ModelError(f"{phase} its config.json takes more than {seconds} s; correct the sizes in it")
    )


def _build_report(spec: "TrainerSpec", model: "ForecastModel", gpu: str | None) -> dict[str, Any]:
    from finetune_trainer.memory.forecast import forecast, has_gpu_limits
    from finetune_trainer.memory.suggestions import choose_batch_size, suggest_changes
    from finetune_trainer.training_plan import plan_training

    on_gpu = gpu is not None or has_gpu_limits(spec)
    forecasts: dict[str, Forecast] = {}

    def forecast_variant(variant: "TrainerSpec") -> "Forecast":
        key = variant.model_dump_json()
        if key not in forecasts:
            forecasts[key] = forecast(plan_training(variant, world_size=variant.world_size), model, on_gpu=on_gpu)
        return forecasts[key]

    auto = spec.training.has_auto_batch_size
    if auto:
        spec = choose_batch_size(spec, forecast_variant, usable_bytes=USABLE_BYTES[gpu] if gpu else 0)
    result = forecast_variant(spec)
    forecast_fields = {**_describe_forecast(result), "auto": auto}
    if gpu is None:
        return {**forecast_fields, "fitsOn": find_fitting_gpus(result.rank.total) if result.on_gpu else []}
    usable_bytes = USABLE_BYTES[gpu]
    fits = result.rank.total <= usable_bytes
    suggestion = None if fits else suggest_changes(spec, forecast_variant, usable_bytes=usable_bytes)
    return {
        **forecast_fields,
        "gpu": {"name": gpu, "usable": usable_bytes, "fits": fits},
        "suggestion": suggestion and {"changes": suggestion.changes, "total": suggestion.forecast.rank.total},
    }


def _describe_forecast(forecast: "Forecast") -> dict[str, Any]:
    return {
        "parameters": forecast.shape.parameters,
        "trainedParameters": forecast.shape.trained_parameters,
        "batch": str(forecast.batch),
        "perDevice": forecast.batch.micro_batch_size,
        "length": forecast.length,
        "onGpu": forecast.on_gpu,
        "rank": _describe_breakdown(forecast.rank),
        "node": _describe_breakdown(forecast.node),
    }


def _describe_breakdown(breakdown: "MemoryBreakdown") -> dict[str, Any]:
    return {"parts": {part.name: part.size for part in breakdown.parts}, "total": breakdown.total}


if __name__ == "__main__":
    sys.exit(main())
