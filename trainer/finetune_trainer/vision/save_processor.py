"""The processor that was trained with, beside the weights, so that the result is loaded as one."""

import json
from pathlib import Path

from transformers.utils import cached_file

from finetune_trainer.vision.processor import Vision
from finetune_trainer.vision.video_processor import DESCRIBED, settings_of

_PROCESSOR = "processor_config.json"
_TEMPLATE = "chat_template.json"


def save_processor(vision: Vision, model_name: str, folder: Path) -> None:
    """The processors of images and videos as they were used; what else there is of them as it was found."""
    vision.seen.processor.save_pretrained(folder)
    videos = settings_of(vision.videos, model_name) if vision.videos else None
    if videos:
        _write(folder / DESCRIBED, videos)
    if found := _find(model_name, _TEMPLATE):
        (folder / _TEMPLATE).write_bytes(found.read_bytes())
    if found := _find(model_name, _PROCESSOR):
        described = json.loads(found.read_text(encoding="utf-8"))
        if "image_processor" in described:
            described["image_processor"] = json.loads(vision.seen.processor.to_json_string())
        if "video_processor" in described and videos:
            described["video_processor"] = videos
        _write(folder / _PROCESSOR, described)


def _write(path: Path, described: dict[str, object]) -> None:
    path.write_text(json.dumps(described, indent=2) + "\n", encoding="utf-8")


def _find(model_name: str, name: str) -> Path | None:
    found = cached_file(model_name, name, _raise_exceptions_for_missing_entries=False)
    return Path(found) if found else None
