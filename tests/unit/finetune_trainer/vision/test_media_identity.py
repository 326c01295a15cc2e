"""Tests that the identity of rows covers the images and videos that rows name by their paths (decisions/547)."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from finetune_trainer.checkpoint.row_identity import RowIdentity, check_trained_rows
from finetune_trainer.errors import OutputError
from testing.models import tiny_vision
from testing.models.vision_fixtures import LoadedVisionModel, describe_folder, write_rows

SIZE = (56, 56)


@pytest.fixture(scope="module")
def qwen_model(get_vision_folder: Callable[[str], Path]) -> LoadedVisionModel:
    folder = get_vision_folder("qwen2_vl")
    return LoadedVisionModel(folder, describe_folder(folder), None)


def write_image(folder: Path, seed: int) -> dict[str, object]:
    return {"images": [tiny_vision.write_image(folder, "a.bmp", SIZE, seed=seed)]}  # of the same size for all seeds


def write_frames(folder: Path, seed: int) -> dict[str, object]:
    frames = [tiny_vision.write_image(folder, f"{number}.bmp", SIZE, seed=seed * number) for number in range(4)]
    return {"videos": [frames]}


def write_video(folder: Path, seed: int) -> dict[str, object]:
    return {"videos": [tiny_vision.write_video(folder, "a.mp4", SIZE, frames=8, fps=4, seed=seed)]}


@pytest.mark.parametrize("write", [write_image, write_frames, write_video])
def test_a_replaced_file_changes_the_rows(
    write: Callable[[Path, int], dict[str, object]], qwen_model: LoadedVisionModel, tmp_path: Path
) -> None:
    def identify(seed: int, cache: str) -> RowIdentity:
        media = write(tmp_path, seed)
        tag = "<image>" if "images" in media else "<video>"
        messages = [{"role": "user", "content": f"{tag}?"}, {"role": "assistant", "content": "It is gray."}]
        rows = write_rows(tmp_path, {"messages": messages, **media})
        return replace(qwen_model, folder=tmp_path / cache).load_data(rows).row_identity

    trained = identify(1, "first")

    check_trained_rows(tmp_path, trained, identify(1, "lost and computed again"))
    with pytest.raises(OutputError, match="trained on other rows: the content of images or videos has changed; restor"):
        check_trained_rows(tmp_path, trained, identify(2, "of the replaced file"))
