"""Tests that packing does not change the gradients of rows with images and videos."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForImageTextToText

from finetune_trainer.data.collator import SequenceLayout
from finetune_trainer.data.load import TrainingData
from finetune_trainer.data.row_filter import RowRules
from finetune_trainer.data.token_dataset import MROPE_POSITION_IDS, Features
from finetune_trainer.data_sources.media import Modality
from finetune_trainer.errors import InvalidSpec
from finetune_trainer.training.isolation_check import IsolationProbe, draw_parts, find_fault
from finetune_trainer.training.preflight import use_default_attention
from finetune_trainer.training.token_losses import compute_logits
from finetune_trainer.vision.families import FAMILIES
from testing.models import tiny_vision
from testing.models.vision_fixtures import (
    LoadedVisionModel,
    assert_close_up_to_rounding,
    compute_gradients,
    describe_folder,
)

MAX_LENGTH = 400


@pytest.fixture(
    scope="module", params=[model_type for model_type in tiny_vision.RECIPES if FAMILIES[model_type].supports_packing]
)
def loaded_model(request: pytest.FixtureRequest, get_vision_folder: Callable[[str], Path]) -> LoadedVisionModel:
    return load_vision_model(get_vision_folder(request.param))


def load_vision_model(folder: Path) -> LoadedVisionModel:
    return LoadedVisionModel(folder, describe_folder(folder), AutoModelForImageTextToText.from_pretrained(folder))


def load_rows(loaded_model: LoadedVisionModel, folder: Path, *, packing: bool) -> TrainingData:
    """Load rows that contain up to two images, and a row with a video if the family supports videos."""
    vision = loaded_model.model_description.vision
    has_videos = vision is not None and vision.video_processor is not None
    rows = tiny_vision.write_rows(
        folder, 4, images=lambda number: number % 3, videos=lambda number: int(has_videos and number == 2)
    )
    return loaded_model.load_data(rows, RowRules(max_length=MAX_LENGTH), packing=packing, maxLength=MAX_LENGTH)


@pytest.mark.parametrize(
    ("packing", "padding_free"),
    [
        pytest.param(True, False, id="packs"),
        pytest.param(False, True, id="without padding"),
        pytest.param(True, True, id="packs without padding"),
    ],
)
def test_all_layouts_have_the_gradients_of_separate_rows(
    loaded_model: LoadedVisionModel, tmp_path: Path, packing: bool, padding_free: bool
) -> None:
    """Rows 0 and 3 have no image; the collator appends a dummy image to a row or pack without one."""
    separate, samples = (load_rows(loaded_model, tmp_path, packing=pack).samples for pack in (False, packing))
    model = loaded_model.model.train()
    expected = compute_gradients(
        model, loaded_model.create_collator(Modality.IMAGE)([separate[row] for row in (2, 0, 1, 3)])
    )

    collate = loaded_model.create_collator(Modality.IMAGE, padding_free=padding_free)
    batch = collate([samples[(2, 0, 1)], samples[(3,)]] if packing else [samples[row] for row in (2, 0, 1, 3)])
    with loaded_model.use_varlen() if padding_free else nullcontext():
        actual = compute_gradients(model, batch)

    assert_same_gradients(actual, expected)


def assert_same_gradients(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, gradient in expected.items():
        assert_close_up_to_rounding(actual[name], gradient)


def build_pair(chosen: Features) -> tuple[Features, Features]:
    """Return a preference pair with the prompt and the pixel inputs of a row, and a shorter rejected completion."""
    end = len(chosen["labels"]) - 2
    ids, labels = chosen["input_ids"][:end].clone(), chosen["labels"][:end].clone()
    ids[-1] = labels[-1] = ids[0]
    return chosen, {**chosen, "input_ids": ids, "labels": labels}


def test_pairs_that_contain_prompt_and_pixels_once_have_the_same_gradients(
    loaded_model: LoadedVisionModel, tmp_path: Path
) -> None:
    pairs = [build_pair(load_rows(loaded_model, tmp_path, packing=False).samples[row][0]) for row in (1, 2, 0)]
    model = loaded_model.model.train()
    whole = loaded_model.create_collator(Modality.IMAGE)(pairs)
    expected = compute_gradients(model, whole)

    shared = loaded_model.create_collator(Modality.IMAGE, padding_free=True, shares_prompts=True)(pairs)
    with loaded_model.use_varlen():
        actual = compute_gradients(model, shared)

    assert len(shared.shared_lengths) == 3
    assert 2 * len(shared.inputs["pixel_values"]) == len(whole.inputs["pixel_values"])
    assert_same_gradients(actual, expected)


def test_a_dummy_image_in_a_pack_is_a_separate_row(loaded_model: LoadedVisionModel, tmp_path: Path) -> None:
    packed = load_rows(loaded_model, tmp_path, packing=True).samples
    plain, with_dummy = (
        collate([packed[(0,)]])
        for collate in (loaded_model.create_collator(), loaded_model.create_collator(Modality.IMAGE))
    )
    length = sum(plain.lengths)

    assert "pixel_values" not in plain.inputs
    assert "pixel_values" in with_dummy.inputs
    assert with_dummy.lengths[:-1] == plain.lengths
    assert with_dummy.target_counts == (*plain.target_counts, 0)
    with torch.no_grad():
        expected, actual = (compute_logits(loaded_model.model.eval(), batch) for batch in (plain, with_dummy))
    torch.testing.assert_close(actual[:, :length], expected, rtol=1e-4, atol=1e-4)


def find_fault_of(loaded_model: LoadedVisionModel, layout: SequenceLayout, *, packed: bool) -> str | None:
    description, model = loaded_model.model_description, loaded_model.model
    assert description.vision is not None
    parts = draw_parts(description.tokenizer, description.config, rows=2)
    use_mrope = description.vision.family.uses_mrope
    probe = IsolationProbe(parts, layout, rows=2, packed=packed, use_mrope=use_mrope)
    run_plainly = partial(use_default_attention, model) if layout.padding_free else nullcontext
    return find_fault(model, probe, torch.device("cpu"), run_plainly)


def test_the_isolation_check_accepts_families_that_support_packing(loaded_model: LoadedVisionModel) -> None:
    assert find_fault_of(loaded_model, SequenceLayout(), packed=True) is None
    assert find_fault_of(loaded_model, SequenceLayout(), packed=False) is None
    with loaded_model.use_varlen():
        assert find_fault_of(loaded_model, SequenceLayout(padding_free=True, shares_prompts=True), packed=True) is None


def test_mrope_position_ids_match_the_model(loaded_model: LoadedVisionModel, tmp_path: Path) -> None:
    vision, samples = loaded_model.model_description.vision, load_rows(loaded_model, tmp_path, packing=True).samples
    assert vision is not None
    if not vision.family.uses_mrope:
        assert MROPE_POSITION_IDS not in samples[(1,)][0]
        return
    (row,) = samples[(2,)]

    positions, _ = loaded_model.model.model.get_rope_index(
        row["input_ids"].unsqueeze(0),
        **{name: row[name] for name in row if name.endswith("grid_thw") or name.startswith("second")},
        **vision.token_type_ids(row["input_ids"].unsqueeze(0)),
    )

    assert torch.equal(row[MROPE_POSITION_IDS].T, positions[:, 0])
    assert row[MROPE_POSITION_IDS].max() < len(row["input_ids"]), "an image has more tokens than its largest position"


@pytest.mark.parametrize(
    ("model_type", "reason"),
    [
        ("gemma3", "attends to image tokens in both directions, even across the rows of a pack"),
        ("qwen3_5", "has linear attention layers, whose state carries over"),
        ("qwen3_5_moe", "has linear attention layers, whose state carries over"),
    ],
)
def test_packing_is_rejected_for_a_family_without_row_isolation(
    tmp_path: Path, get_vision_folder: Callable[[str], Path], model_type: str, reason: str
) -> None:
    model = load_vision_model(get_vision_folder(model_type))

    with pytest.raises(InvalidSpec, match=rf"spec\.dataset\.packing: model \"tiny\" {reason}"):
        load_rows(model, tmp_path, packing=True)


@pytest.mark.parametrize("model_type", [name for name in tiny_vision.RECIPES if not FAMILIES[name].supports_packing])
def test_the_isolation_check_accepts_padded_rows_of_all_families(
    get_vision_folder: Callable[[str], Path], model_type: str
) -> None:
    model = load_vision_model(get_vision_folder(model_type))

    assert find_fault_of(model, SequenceLayout(), packed=False) is None


@pytest.mark.parametrize("model_type", ["qwen3_5", "qwen3_5_moe"])
def test_the_isolation_check_detects_linear_attention(
    get_vision_folder: Callable[[str], Path], model_type: str
) -> None:
    """The check also covers text training (textOnly), for which the family does not apply."""
    model = load_vision_model(get_vision_folder(model_type))

    assert (
        find_fault_of(model, SequenceLayout(), packed=True) == "a sequence changes the logits of another one in its row"
    )
