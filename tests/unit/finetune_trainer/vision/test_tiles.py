"""Tests the limit of tiles into which InternVL divides an image (maxTiles)."""

import json
from pathlib import Path

import pytest
import torch

from finetune_trainer.errors import InvalidSpec
from testing.models import tiny_vision
from testing.models.vision_fixtures import LoadedVisionModel, describe_folder, write_rows

MESSAGES = [{"role": "user", "content": "<image>?"}, {"role": "assistant", "content": "It is blue."}]


@pytest.mark.parametrize(("max_tiles", "expected_tiles"), [(1, 1), (2, 3), (4, 5), (None, 5)])
def test_large_images_are_divided_into_at_most_max_tiles(
    tmp_path: Path, max_tiles: int | None, expected_tiles: int
) -> None:
    """An image of several tiles has one more for the whole image; a tile has 4 tokens."""
    folder = tiny_vision.build(tmp_path / "model", "internvl")
    model_description = describe_folder(folder, maxTiles=max_tiles)
    vision = model_description.vision
    assert vision is not None
    name = tiny_vision.write_image(tmp_path, "a.png", (448, 112), seed=1)
    data = LoadedVisionModel(folder, model_description, torch.nn.Identity()).load_data(
        write_rows(tmp_path, {"messages": MESSAGES, "images": [name]})
    )

    (row,) = data.samples[0]
    assert len(row["pixel_values"]) == expected_tiles
    assert int((row["input_ids"] == vision.components.config.image_token_id).sum()) == 4 * expected_tiles
    assert vision.components.processor.to_dict()["max_patches"] == (max_tiles or 4)


def test_max_tiles_changes_the_cache_key(tmp_path: Path) -> None:
    folder = tiny_vision.build(tmp_path / "model", "internvl")
    first, second = (describe_folder(folder, maxTiles=max_tiles).vision for max_tiles in (2, 3))

    assert first is not None
    assert second is not None
    assert first.cache_description != second.cache_description


@pytest.mark.parametrize(
    ("model_type", "remedy"), [("qwen2_vl", "leave maxTiles out, or set maxPixels"), ("llava", "leave maxTiles out$")]
)
def test_max_tiles_is_rejected_for_other_families(tmp_path: Path, model_type: str, remedy: str) -> None:
    folder = tiny_vision.build(tmp_path / "model", model_type)

    with pytest.raises(InvalidSpec, match=rf"spec\.model\.maxTiles: .* does not divide images into tiles; {remedy}"):
        describe_folder(folder, maxTiles=2)


def test_max_tiles_below_the_minimum_of_the_processor_is_rejected(tmp_path: Path) -> None:
    folder = tiny_vision.build(tmp_path / "model", "internvl")
    settings = json.loads((folder / "preprocessor_config.json").read_text())
    (folder / "preprocessor_config.json").write_text(json.dumps({**settings, "min_patches": 3}))

    with pytest.raises(InvalidSpec, match=r"spec\.model\.maxTiles: 2 is less than the 3 tiles"):
        describe_folder(folder, maxTiles=2)
