"""Saves the image and video processors beside the weights, so that the result can be loaded like the original model."""

import json
from pathlib import Path

from finetune_trainer.vision.processor import VisionProcessor
from finetune_trainer.vision.video_processor import (
    PROCESSOR_FILE,
    VIDEO_SETTINGS_FILE,
    export_video_settings,
    find_model_file,
)

_TEMPLATE_FILE = "chat_template.json"
_PROCESSOR_FILES = ("preprocessor_config.json", VIDEO_SETTINGS_FILE, PROCESSOR_FILE, _TEMPLATE_FILE)


def save_processor(vision: VisionProcessor, model_name: str, revision: str | None, folder: Path) -> None:
    """Save the processors with the settings used in training, and copy other processor files of the model.

    revision: branch, tag or commit of a model on the Hub.
    """
    vision.components.processor.save_pretrained(folder)
    video_settings = None
    if vision.video_processor:
        video_settings = export_video_settings(vision.video_processor, model_name, revision)
        _write_json(folder / VIDEO_SETTINGS_FILE, video_settings)
    if template := find_model_file(model_name, revision, _TEMPLATE_FILE):
        (folder / _TEMPLATE_FILE).write_bytes(template.read_bytes())
    if processor := find_model_file(model_name, revision, PROCESSOR_FILE):
        settings = json.loads(processor.read_text(encoding="utf-8"))
        if "image_processor" in settings:
            settings["image_processor"] = json.loads(vision.components.processor.to_json_string())
        if "video_processor" in settings and video_settings:
            settings["video_processor"] = video_settings
        _write_json(folder / PROCESSOR_FILE, settings)


def copy_processor_files(model_name: str, revision: str | None, folder: Path) -> None:
    """Copy the processor files of a model whose media are not trained, so that the result can be served with media."""
    for name in _PROCESSOR_FILES:
        if file := find_model_file(model_name, revision, name):
            (folder / name).write_bytes(file.read_bytes())


def _write_json(path: Path, settings: dict[str, object]) -> None:
    path.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
