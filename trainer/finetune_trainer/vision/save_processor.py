"""Saves the image and video processors beside the weights, so that the result can be loaded like the original model."""

import json
from pathlib import Path

from transformers.utils import cached_file

from finetune_trainer.vision.processor import VisionProcessor
from finetune_trainer.vision.video_processor import VIDEO_SETTINGS_FILE, export_video_settings

_PROCESSOR_FILE = "processor_config.json"
_TEMPLATE_FILE = "chat_template.json"


def save_processor(vision: VisionProcessor, model_name: str, folder: Path) -> None:
    """Save the processors with the settings used in training, and copy other processor files of the model."""
    vision.components.processor.save_pretrained(folder)
    video_settings = export_video_settings(vision.video_processor, model_name) if vision.video_processor else None
    if video_settings:
        _write_json(folder / VIDEO_SETTINGS_FILE, video_settings)
    if template := _find_file(model_name, _TEMPLATE_FILE):
        (folder / _TEMPLATE_FILE).write_bytes(template.read_bytes())
    if processor := _find_file(model_name, _PROCESSOR_FILE):
        settings = json.loads(processor.read_text(encoding="utf-8"))
        if "image_processor" in settings:
            settings["image_processor"] = json.loads(vision.components.processor.to_json_string())
        if "video_processor" in settings and video_settings:
            settings["video_processor"] = video_settings
        _write_json(folder / _PROCESSOR_FILE, settings)


def _write_json(path: Path, settings: dict[str, object]) -> None:
    path.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def _find_file(model_name: str, name: str) -> Path | None:
    """Return the path of a model file, or None if it does not exist. Downloads the file if necessary."""
    path = cached_file(model_name, name, _raise_exceptions_for_missing_entries=False)
    return Path(path) if path else None
