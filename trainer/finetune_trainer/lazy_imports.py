"""Hide installed libraries that a job does not use, so that transformers, peft and accelerate do not import them.

See decisions/516 for the reasons.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from finetune_api.v1alpha1.training import EIGHT_BIT_ADAMW

_GPU_LIBRARIES = ("bitsandbytes", "deepspeed")


def hide_unused_libraries(spec_file: Path) -> None:
    """Block imports of unneeded libraries to start seconds faster. Must be called before torch is imported.

    spec_file: the JSON file of the job's spec.
    """
    for module in find_unused_libraries(_read_spec_json(spec_file)):
        sys.modules[module] = None  # type: ignore[assignment]  # makes `import` raise ModuleNotFoundError


def may_use_gpu_on_import(spec_file: Path) -> bool:
    """Return whether the job needs a library that may initialise CUDA when it is imported."""
    return not set(_GPU_LIBRARIES) <= set(find_unused_libraries(_read_spec_json(spec_file)))


def find_unused_libraries(spec: dict[str, Any] | None) -> Iterator[str]:
    """Yield the libraries that the spec does not need; none if the spec is unreadable."""
    if spec is None:
        return
    yield from ("datasets", "scipy")  # the trainer reads rows itself, and supports no model that needs scipy
    lora, training = spec.get("lora"), spec.get("training")
    quantizes_weights = isinstance(lora, dict) and lora.get("quantization")
    quantizes_moments = isinstance(training, dict) and training.get("optim") == EIGHT_BIT_ADAMW
    if not (quantizes_weights or quantizes_moments):
        yield "bitsandbytes"
    if not spec.get("deepspeed"):
        yield "deepspeed"


def _read_spec_json(spec_file: Path) -> dict[str, Any] | None:
    """Return the spec, or None if it is unreadable; the trainer reports that later with a better message."""
    try:
        spec = json.loads(spec_file.read_bytes())
    except (OSError, ValueError):
        return None
    return spec if isinstance(spec, dict) else None
