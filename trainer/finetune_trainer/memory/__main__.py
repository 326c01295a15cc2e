"""`python -m finetune_trainer.memory SPEC.json [--gpu NAME]`: the forecast of a job as JSON."""

import argparse
import json
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetune_trainer.errors import TrainerError, UserError
from finetune_trainer.lazy_imports import hide_what_is_not_needed
from finetune_trainer.memory.gpus import USABLE_BYTES, names_that_fit

if TYPE_CHECKING:
    from finetune_trainer.memory.breakdown import Parts
    from finetune_trainer.memory.forecast import Forecast

TRY_LATER, BAD_INPUT = 1, 2  # exit codes


def main() -> int:
    """What the user must change is said on stderr."""
    parser = argparse.ArgumentParser(prog="python -m finetune_trainer.memory", description=__doc__)
    parser.add_argument("spec", type=Path, help="the spec of a job, as JSON")
    parser.add_argument("--gpu", metavar="NAME", help=f"one of {', '.join(USABLE_BYTES)}")
    options = parser.parse_args()
    if options.gpu is not None and options.gpu not in USABLE_BYTES:
        print(
            f"--gpu {options.gpu}: no GPU is known by that name; known are {', '.join(USABLE_BYTES)}", file=sys.stderr
        )
        return BAD_INPUT
    try:
        print(json.dumps(describe(options.spec, options.gpu)))
    except TrainerError as error:
        print(error, file=sys.stderr)
        return BAD_INPUT if isinstance(error, UserError) else TRY_LATER
    return 0


def describe(path: Path, gpu: str | None) -> dict[str, Any]:
    """Bytes by part, whether they fit, and what to change if they do not."""
    hide_what_is_not_needed(path)
    from finetune_trainer.memory.forecast import forecast, read_model, uses_gpus
    from finetune_trainer.memory.suggestions import choose_size, suggest
    from finetune_trainer.training_arguments import read_spec

    spec = read_spec(path)
    forecaster = partial(forecast, model=read_model(spec), on_gpu=gpu is not None or uses_gpus(spec))
    auto = spec.training.chooses_batch
    if auto:
        spec = choose_size(spec, forecaster, usable_bytes=USABLE_BYTES[gpu] if gpu else 0)
    found = forecaster(spec)
    described = {**_describe_forecast(found), "auto": auto}
    if gpu is None:
        return {**described, "fitsOn": names_that_fit(found.rank.total) if found.on_gpu else []}
    usable = USABLE_BYTES[gpu]
    fits = found.rank.total <= usable
    better = None if fits else suggest(spec, forecaster, usable_bytes=usable)
    return {
        **described,
        "gpu": {"name": gpu, "usable": usable, "fits": fits},
        "suggestion": better and {"changes": better.changes, "total": better.forecast.rank.total},
    }


def _describe_forecast(found: "Forecast") -> dict[str, Any]:
    return {
        "parameters": found.shape.parameters,
        "trainedParameters": found.shape.trained_parameters,
        "batch": str(found.batch),
        "perDevice": found.batch.per_device,
        "length": found.length,
        "onGpu": found.on_gpu,
        "rank": _describe_parts(found.rank),
        "node": _describe_parts(found.node),
    }


def _describe_parts(parts: "Parts") -> dict[str, Any]:
    return {"parts": {part.name: part.size for part in parts.parts}, "total": parts.total}


if __name__ == "__main__":
    sys.exit(main())
