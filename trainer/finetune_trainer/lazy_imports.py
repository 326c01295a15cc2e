"""Libraries that others load wherever they are installed, which takes seconds, are hidden from jobs that use none."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_ON_GPUS = ("bitsandbytes", "deepspeed")


def hide_what_is_not_needed(spec_file: Path) -> None:
    """To be called before torch is imported, with the JSON file of the job's spec."""
    for module in not_needed(_read(spec_file)):
        sys.modules[module] = None  # type: ignore[assignment]  # as Python says that there is no such module


def uses_gpus_when_imported(spec_file: Path) -> bool:
    """Of these two it is not certain that they leave CUDA alone until they are used."""
    return not set(_ON_GPUS) <= set(not_needed(_read(spec_file)))


def not_needed(spec: dict[str, Any] | None) -> Iterator[str]:
    """As transformers, peft and accelerate would load them, of jobs that have no use for them."""
    if spec is None:
        return
    yield from ("datasets", "scipy")  # for rows and models of a kind that we do not have
    lora = spec.get("lora")
    if not (isinstance(lora, dict) and lora.get("quantization")):
        yield "bitsandbytes"
    if not spec.get("deepspeed"):
        yield "deepspeed"


def _read(spec_file: Path) -> dict[str, Any] | None:
    """None of what the trainer tells better."""
    try:
        spec = json.loads(spec_file.read_bytes())
    except (OSError, ValueError):
        return None
    return spec if isinstance(spec, dict) else None
