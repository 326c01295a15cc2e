"""The processor that was trained with, beside the weights, so that the result is loaded as one."""

import json
from pathlib import Path

from transformers.utils import cached_file

from finetune_trainer.vision.images import Vision

_PROCESSOR = "processor_config.json"
_OTHERS = ("video_preprocessor_config.json", "chat_template.json")


def save_processor(vision: Vision, model_name: str, folder: Path) -> None:
    """The image processor as it was used; what else the model's own processor is made of as it was found."""
    vision.seen.processor.save_pretrained(folder)
    for name in _OTHERS:
        if found := _find(model_name, name):
            (folder / name).write_bytes(found.read_bytes())
    if found := _find(model_name, _PROCESSOR):
        described = json.loads(found.read_text(encoding="utf-8"))
        if "image_processor" in described:
            described["image_processor"] = json.loads(vision.seen.processor.to_json_string())
        (folder / _PROCESSOR).write_text(json.dumps(described, indent=2) + "\n", encoding="utf-8")


def _find(model_name: str, name: str) -> Path | None:
    found = cached_file(model_name, name, _raise_exceptions_for_missing_entries=False)
    return Path(found) if found else None
