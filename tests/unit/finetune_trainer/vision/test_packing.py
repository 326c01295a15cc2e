"""Rows with images and videos in packs: as if each were alone."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForImageTextToText

from finetune_trainer.data.load import Data
from finetune_trainer.data.packing import AXES, POSITIONS
from finetune_trainer.data.row_filter import Rules
from finetune_trainer.data_sources.media import Kind
from finetune_trainer.errors import InvalidSpec
from finetune_trainer.methods.sft import predict
from finetune_trainer.training.preflight import check_packs, two_rows_each
from finetune_trainer.vision.families import FAMILIES
from testing.models import tiny_vision
from testing.models.vision_fixtures import Loaded, assert_equal_but_for_rounding, describe, gradients_of

ROOM = 400


@pytest.fixture(scope="module", params=[kind for kind in tiny_vision.KINDS if FAMILIES[kind].packs])
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    folder = tiny_vision.build(tmp_path_factory.mktemp(request.param), request.param)
    return Loaded(folder, describe(folder), AutoModelForImageTextToText.from_pretrained(folder))


def data(loaded: Loaded, folder: Path, *, packing: bool) -> Data:
    """Rows with no image, one and two; of a family that sees videos one of them shows a video, too."""
    films = loaded.pretrained.vision is not None and loaded.pretrained.vision.videos is not None
    rows = tiny_vision.rows(
        folder, 4, images=lambda number: number % 3, videos=lambda number: int(films and number == 2)
    )
    return loaded.data(rows, Rules(max_length=ROOM), packing=packing, maxLength=ROOM)


@torch.no_grad()
def test_logits_in_a_pack_are_those_of_the_rows_alone(loaded: Loaded, tmp_path: Path) -> None:
    alone, packed = (data(loaded, tmp_path, packing=packing).samples for packing in (False, True))
    collate, model = loaded.collate(), loaded.model.eval()

    batch = collate([packed[(2, 0, 1)], packed[(3,)]])
    first, second = predict(model, batch)

    start = 0
    for row in (2, 0, 1):
        expected = predict(model, collate([alone[row]]))[0]
        torch.testing.assert_close(first[start : start + len(expected)], expected, rtol=1e-4, atol=1e-4)
        start += len(expected)
    expected = predict(model, collate([alone[3]]))[0]
    torch.testing.assert_close(second[: len(expected)], expected, rtol=1e-4, atol=1e-4)


def test_gradients_of_a_pack_are_those_of_its_rows(loaded: Loaded, tmp_path: Path) -> None:
    alone, packed = (data(loaded, tmp_path, packing=packing).samples for packing in (False, True))
    collate, model = loaded.collate(), loaded.model.train()

    expected = gradients_of(model, collate([alone[row] for row in (1, 2, 3)]))
    found = gradients_of(model, collate([packed[(1, 2)], packed[(3,)]]))

    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert_equal_but_for_rounding(found[name], gradient)


def test_what_stands_in_is_a_row_of_its_own(loaded: Loaded, tmp_path: Path) -> None:
    packed = data(loaded, tmp_path, packing=True).samples
    plain, always = (collate([packed[(0,)]]) for collate in (loaded.collate(), loaded.collate(Kind.IMAGE)))
    length = plain["input_ids"].shape[1]

    assert "pixel_values" not in plain
    assert "pixel_values" in always
    assert always[POSITIONS][0, length:].tolist() == list(range(always["input_ids"].shape[1] - length))
    with torch.no_grad():
        expected, found = (predict(loaded.model.eval(), batch) for batch in (plain, always))
    torch.testing.assert_close(found[:, :length], expected, rtol=1e-4, atol=1e-4)


def test_packs_are_checked_before_the_first_step(loaded: Loaded) -> None:
    vision = loaded.pretrained.vision
    assert vision is not None

    check_packs(loaded.model, two_rows_each(2, torch.device("cpu"), axes=vision.family.has_axes), name="tiny")


def test_axes_are_those_that_the_model_finds_itself(loaded: Loaded, tmp_path: Path) -> None:
    vision, samples = loaded.pretrained.vision, data(loaded, tmp_path, packing=True).samples
    assert vision is not None
    if not vision.family.has_axes:
        assert AXES not in samples[(1,)][0]
        return
    (row,) = samples[(2,)]

    positions, _ = loaded.model.model.get_rope_index(
        row["input_ids"].unsqueeze(0),
        **{name: row[name] for name in row if name.endswith("grid_thw") or name.startswith("second")},
        **vision.types(row["input_ids"].unsqueeze(0)),
    )

    assert torch.equal(row[AXES].T, positions[:, 0])
    assert row[AXES].max() < len(row["input_ids"]), "an image has more tokens than rows and columns"


def test_a_family_whose_masks_do_not_know_of_rows_is_refused(tmp_path: Path) -> None:
    folder = tiny_vision.build(tmp_path / "model", "gemma3")
    gemma = Loaded(folder, describe(folder), AutoModelForImageTextToText.from_pretrained(folder))

    with pytest.raises(InvalidSpec, match=r"spec\.dataset\.packing: model \"tiny\" reads images in both directions"):
        data(gemma, tmp_path, packing=True)
