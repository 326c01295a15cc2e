"""Libraries that others load wherever they are installed, which takes seconds, are hidden from jobs that use none."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path


def hide_what_is_not_needed(spec_file: Path) -> None:
    """To be called before torch is imported, with the JSON file of the job's spec."""
    try:
        spec = json.loads(spec_file.read_bytes())
    except (OSError, ValueError):  # which the trainer tells better
        return
    if isinstance(spec, dict):
        for module in not_needed(spec):
            sys.modules[module] = None  # type: ignore[assignment]  # as Python says that there is no such module


def not_needed(spec: dict[str, object]) -> Iterator[str]:
    """As transformers, peft and accelerate would load them, of jobs that have no use for them."""
    yield from ("datasets", "scipy")  # for rows and models of a kind that we do not have
    lora = spec.get("lora")
    if not (isinstance(lora, dict) and lora.get("quantization")):
        yield "bitsandbytes"
    if not spec.get("deepspeed"):
        yield "deepspeed"
