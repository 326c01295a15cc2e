"""Tests image processing and the freezing of components for vision-language models."""

import base64
import copy
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, LlavaProcessor

from finetune_api.v1alpha1.lora import Lora
from finetune_trainer.data.row_filter import RowRules
from finetune_trainer.data.row_rendering import build_sft_renderer
from finetune_trainer.data.token_dataset import IGNORE_INDEX
from finetune_trainer.data_sources.media import Modality
from finetune_trainer.errors import DatasetError, InvalidSpec, StorageFault
from finetune_trainer.model.lora import add_adapters
from finetune_trainer.training.token_losses import compute_logits
from finetune_trainer.vision.families import FAMILIES, VisionFamily
from finetune_trainer.vision.freeze import (
    build_frozen_module_pattern,
    find_group,
    freeze_parameters,
    has_trained_vision_weights,
    resolve_frozen_groups,
)
from testing.fakes.unreadable_file import UNREADABLE_FILE
from testing.models import tiny_text, tiny_vision
from testing.models.vision_fixtures import (
    LoadedVisionModel,
    assert_close_up_to_rounding,
    compute_gradients,
    describe_folder,
    write_rows,
)

MODEL_TYPES = tuple(tiny_vision.RECIPES)


@pytest.fixture(scope="module", params=MODEL_TYPES)
def loaded_model(request: pytest.FixtureRequest, get_vision_folder: Callable[[str], Path]) -> LoadedVisionModel:
    return load_vision_model(get_vision_folder(request.param))


@pytest.fixture(scope="module")
def qwen_model(get_vision_folder: Callable[[str], Path]) -> LoadedVisionModel:
    return load_vision_model(get_vision_folder("qwen2_vl"))


def load_vision_model(folder: Path) -> LoadedVisionModel:
    return LoadedVisionModel(folder, describe_folder(folder), AutoModelForImageTextToText.from_pretrained(folder))


def build_row(text: str, *images: str, completion: str = "It is blue.") -> dict[str, Any]:
    messages = [{"role": "user", "content": text}, {"role": "assistant", "content": completion}]
    return {"messages": messages, "images": list(images)}


def test_image_tokens_and_user_turns_are_not_targets(loaded_model: LoadedVisionModel, tmp_path: Path) -> None:
    data = loaded_model.load_data(tiny_vision.write_rows(tmp_path, 6, images=lambda number: number % 3))
    image_token = loaded_model.model.config.image_token_id
    conversations = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]

    for index, conversation in enumerate(conversations):
        (row,) = data.samples[index]
        targets = row["labels"][row["labels"] != IGNORE_INDEX]

        assert image_token not in targets
        assert int((row["input_ids"] == image_token).sum()) > 0 or not conversation.get("images")
        assert (
            loaded_model.model_description.tokenizer.decode(targets)
            == conversation["messages"][1]["content"] + "<|im_end|>"
        )


def test_image_tokens_are_not_targets_with_loss_on_all(loaded_model: LoadedVisionModel, tmp_path: Path) -> None:
    name = tiny_vision.write_image(tmp_path, "a.png", (56, 84), seed=1)
    (row,) = loaded_model.load_data(
        write_rows(tmp_path, build_row("<image>?", name)), method=build_sft_renderer("all")
    ).samples[0]

    is_target = row["labels"][1:] != IGNORE_INDEX
    assert not is_target[row["input_ids"][1:] == loaded_model.model.config.image_token_id].any()
    assert is_target[-10:].all()


def test_image_tokens_match_the_number_of_image_embeddings(loaded_model: LoadedVisionModel, tmp_path: Path) -> None:
    """The model raises an error if the numbers of tokens and embeddings differ."""
    sizes = ((28, 28), (200, 60), (90, 300))
    names = [tiny_vision.write_image(tmp_path, f"{size}.png", size, seed=1) for size in sizes]
    data = loaded_model.load_data(
        write_rows(tmp_path, *(build_row("<image>?", name) for name in names), build_row("<image>" * 3, *names))
    )
    collate = loaded_model.create_collator()

    assert compute_logits(loaded_model.model, collate([data.samples[0]])).isfinite().all()
    together = collate([data.samples[index] for index in range(4)])
    assert compute_logits(loaded_model.model, together).isfinite().all()


def test_the_logits_depend_on_the_image(loaded_model: LoadedVisionModel, tmp_path: Path) -> None:
    names = [tiny_vision.write_image(tmp_path, f"{seed}.png", (56, 56), seed=seed) for seed in range(2)]
    data = loaded_model.load_data(write_rows(tmp_path, *(build_row("<image>?", name) for name in names)))
    collate = loaded_model.create_collator()

    first, second = (compute_logits(loaded_model.model, collate([data.samples[index]])) for index in range(2))

    assert (first - second).abs().max() > 1e-4


def test_a_dummy_image_does_not_change_gradients(loaded_model: LoadedVisionModel, tmp_path: Path) -> None:
    data = loaded_model.load_data(tiny_vision.write_rows(tmp_path, 4, images=lambda number: number // 3))
    rows = [data.samples[index] for index in range(3)]
    real = compute_gradients(loaded_model.model, loaded_model.create_collator(Modality.IMAGE)([data.samples[3]]))
    plain, with_dummy = loaded_model.create_collator()(rows), loaded_model.create_collator(Modality.IMAGE)(rows)
    assert "pixel_values" in with_dummy.inputs
    assert "pixel_values" not in plain.inputs

    expected, actual = compute_gradients(loaded_model.model, plain), compute_gradients(loaded_model.model, with_dummy)
    assert expected.keys() < actual.keys()
    assert actual.keys() == real.keys(), "a dummy and a real image use the same parameters"
    for name, gradient in actual.items():
        if name in expected:
            assert_close_up_to_rounding(gradient, expected[name])
        else:
            assert find_group(name, FAMILIES[loaded_model.model.config.model_type]) != "language"
            assert gradient.abs().max() == 0


@pytest.mark.parametrize(
    ("frozen_groups", "trained_groups"),
    [
        pytest.param(None, {"language"}, id="default"),
        pytest.param((), {"vision", "aligner", "language"}, id="no group frozen"),
        pytest.param(("vision",), {"aligner", "language"}, id="vision"),
        pytest.param(("language",), {"vision", "aligner"}, id="language"),
        pytest.param(("vision", "language"), {"aligner"}, id="vision and language"),
        pytest.param(("aligner", "language"), {"vision"}, id="aligner and language"),
    ],
)
def test_only_trained_groups_have_adapters(
    loaded_model: LoadedVisionModel, frozen_groups: tuple[str, ...] | None, trained_groups: set[str]
) -> None:
    family, model = FAMILIES[loaded_model.model.config.model_type], copy.deepcopy(loaded_model.model)
    groups = resolve_frozen_groups(frozen_groups)
    freeze_parameters(model, family, groups)

    assert {
        find_group(name, family) for name, weight in model.named_parameters() if weight.requires_grad
    } == trained_groups

    adapted_groups = trained_groups - find_groups_without_linear_layers(family, model)
    if not adapted_groups:
        with pytest.raises(InvalidSpec, match=r"spec\.lora\.targetModules"):
            add_adapters(model, Lora(), seed=1, exclude_modules=build_frozen_module_pattern(family, groups))
        return
    adapted = add_adapters(model, Lora(), seed=1, exclude_modules=build_frozen_module_pattern(family, groups))
    names = {
        name.removeprefix("base_model.model.") for name, weight in adapted.named_parameters() if weight.requires_grad
    }
    assert {find_group(name, family) for name in names} == adapted_groups
    assert has_trained_vision_weights(adapted, family) == bool(adapted_groups - {"language"})


def test_all_trainable_parameters_have_gradients(loaded_model: LoadedVisionModel, tmp_path: Path) -> None:
    """DDP would wait for missing gradients, for example of the last CLIP layer in LLaVA."""
    family = FAMILIES[loaded_model.model.config.model_type]
    data = loaded_model.load_data(tiny_vision.write_rows(tmp_path, 2, images=lambda number: 1))
    model = copy.deepcopy(loaded_model.model)
    freeze_parameters(model, family, (), unused_pattern=family.get_unused_modules(model.config))

    with_gradients = compute_gradients(
        model, loaded_model.create_collator(Modality.IMAGE)([data.samples[index] for index in range(2)])
    ).keys()

    assert {name for name, weight in model.named_parameters() if weight.requires_grad} == set(with_gradients)


def find_groups_without_linear_layers(family: VisionFamily, model: torch.nn.Module) -> set[str]:
    """Return the groups that cannot have adapters, such as the aligner of Gemma 3, which has no linear layer."""
    linear = {find_group(name, family) for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    return {"vision", "aligner", "language"} - linear


def test_freezing_all_groups_is_rejected() -> None:
    with pytest.raises(InvalidSpec, match="all of vision, aligner and language are frozen"):
        resolve_frozen_groups(("vision", "aligner", "language"))


def test_llava_inputs_match_the_output_of_the_transformers_processor(
    tmp_path: Path, get_vision_folder: Callable[[str], Path]
) -> None:
    """This test uses LLaVA, because its processor does not need torchvision."""
    folder = get_vision_folder("llava")
    model_description = describe_folder(folder)
    assert model_description.vision is not None
    processor = LlavaProcessor(
        image_processor=model_description.vision.components.processor,
        tokenizer=model_description.tokenizer,
        patch_size=14,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
    )
    name = tiny_vision.write_image(tmp_path, "a.png", (90, 60), seed=1)
    data = LoadedVisionModel(folder, model_description, torch.nn.Identity()).load_data(
        write_rows(tmp_path, build_row("<image>what?", name))
    )

    with Image.open(tmp_path / name) as image:
        text = "<|im_start|>user\n<image>\nwhat?<|im_end|>\n<|im_start|>assistant\nIt is blue.<|im_end|>\n"
        expected = processor(text=text, images=image, return_tensors="pt")

    (row,) = data.samples[0]
    assert row["input_ids"].tolist() == expected["input_ids"][0].tolist()
    torch.testing.assert_close(row["pixel_values"], expected["pixel_values"])


@pytest.mark.parametrize(
    ("size", "expected_tokens"),
    [
        pytest.param((1000, 1000), 9, id="above the maximum"),
        pytest.param((28, 28), 4, id="below the minimum"),
        pytest.param((56, 84), 6, id="within the limits"),
    ],
)
def test_images_are_scaled_to_the_pixel_limits(
    get_vision_folder: Callable[[str], Path], size: tuple[int, int], expected_tokens: int
) -> None:
    """Qwen2-VL uses one token per 784 pixels."""
    vision = describe_folder(get_vision_folder("qwen2_vl"), maxPixels=9 * 784, minPixels=2 * 784).vision
    assert vision is not None

    assert vision.render_image(size).count("<|image_pad|>") == expected_tokens


def test_the_exif_orientation_is_applied_before_tokens_are_counted(
    qwen_model: LoadedVisionModel, tmp_path: Path
) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # orientation tag: 6 means rotated by 90 degrees
    Image.new("RGB", (28 * 8, 28 * 3)).save(tmp_path / "rotated.jpg", exif=exif)
    data = qwen_model.load_data(write_rows(tmp_path, build_row("<image>?", "rotated.jpg")))

    assert data.samples[0][0]["image_grid_thw"].tolist() == [[1, 16, 6]]
    assert compute_logits(qwen_model.model, qwen_model.create_collator()([data.samples[0]])).isfinite().all()


def test_truncation_counts_image_tokens_and_does_not_split_images(
    qwen_model: LoadedVisionModel, tmp_path: Path
) -> None:
    name = tiny_vision.write_image(tmp_path, "a.png", (140, 140), seed=1)  # this image has 25 tokens
    second_user_turn = {"role": "user", "content": "<image>"}
    row = build_row("<image>?", name, name)
    row["messages"] = [*row["messages"], second_user_turn, row["messages"][1]]
    length = int(qwen_model.load_data(write_rows(tmp_path, row)).train.lengths[0])
    assert length > 2 * 25

    truncated = qwen_model.load_data(tmp_path / "rows.jsonl", RowRules(max_length=length - 20, overlong="truncate"))
    (sample,) = truncated.samples[0]
    assert int((sample["input_ids"] == qwen_model.model.config.image_token_id).sum()) == 25
    assert len(sample["input_ids"]) < length - 20
    assert sample["image_grid_thw"].tolist() == [[1, 10, 10]]
    with pytest.raises(DatasetError, match=f"longer than {length - 1} tokens"):
        qwen_model.load_data(tmp_path / "rows.jsonl", RowRules(max_length=length - 1))


def test_an_embedded_image_and_an_image_file_yield_the_same_sample(
    qwen_model: LoadedVisionModel, tmp_path: Path
) -> None:
    name = tiny_vision.write_image(tmp_path, "a.png", (56, 84), seed=1)
    url = "data:image/png;base64," + base64.b64encode((tmp_path / name).read_bytes()).decode()
    embedded = build_row("")
    embedded["messages"][0]["content"] = [
        {"type": "image_url", "image_url": {"url": url}},
        {"type": "text", "text": "?"},
    ]
    data = qwen_model.load_data(write_rows(tmp_path, embedded, build_row("<image>?", name)))

    (from_row,), (from_path,) = data.samples[0], data.samples[1]
    assert from_row.keys() == from_path.keys()
    for name in from_row:
        assert torch.equal(from_row[name], from_path[name])


def build_row_with_postscript(folder: Path) -> dict[str, Any]:
    (folder / "a.png").write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 56 56\n%%EndComments\nshowpage\n")
    return build_row("<image>?", "a.png")


def build_row_with_text_file(folder: Path) -> dict[str, Any]:
    (folder / "text.png").write_text("not an image")
    return build_row("<image>", "text.png")


def build_row_with_extreme_aspect_ratio(folder: Path) -> dict[str, Any]:
    Image.new("L", (1000, 2)).save(folder / "line.png")
    return build_row("<image>", "line.png")


@pytest.mark.parametrize(
    ("build_bad_row", "message"),
    [
        (lambda _: build_row("<image>", "missing.png"), r"image .*missing.png does not exist; correct its path"),
        (build_row_with_text_file, r"image .*text.png is not a readable image; replace it"),
        (build_row_with_postscript, r"image .*a.png cannot be read \(EPS is not supported"),
        (lambda _: build_row("<image>", "."), r"does not exist; correct its path"),
        (build_row_with_extreme_aspect_ratio, r"line.png cannot be read \(absolute aspect ratio"),
        (lambda _: build_row("what is <|image_pad|>?"), r"<\|image_pad\|> 1 times more than there are images"),
        (
            lambda _: build_row("<image>what is this?"),
            r"<image> 1 times more than there are images; list the images in a column images",
        ),
    ],
)
def test_a_row_with_an_invalid_image_is_a_bad_row(
    qwen_model: LoadedVisionModel, tmp_path: Path, build_bad_row: Callable[[Path], dict[str, Any]], message: str
) -> None:
    good = build_row("no image")
    rows = write_rows(tmp_path, good, build_bad_row(tmp_path))

    with pytest.raises(DatasetError, match=rf"rows.jsonl line 2: .*{message}"):
        qwen_model.load_data(rows)
    assert len(qwen_model.load_data(rows, RowRules(on_bad_row="skip")).train) == 1


def test_decoding_a_truncated_image_raises_a_dataset_error(qwen_model: LoadedVisionModel, tmp_path: Path) -> None:
    """Tokenization does not detect truncation, because it reads only the JPEG header."""
    file = tmp_path / tiny_vision.write_image(tmp_path, "a.jpg", (280, 280), seed=1)
    file.write_bytes(file.read_bytes()[:2000])
    data = qwen_model.load_data(write_rows(tmp_path, build_row("<image>?", "a.jpg")))

    with pytest.raises(DatasetError, match=r"rows.jsonl line 1: image .*a.jpg cannot be read"):
        data.samples[0]


def test_a_row_with_an_unreadable_image_file_is_not_skipped(qwen_model: LoadedVisionModel, tmp_path: Path) -> None:
    (tmp_path / "a.jpg").symlink_to(UNREADABLE_FILE)

    with pytest.raises(StorageFault, match=r"rows.jsonl line 1: image .*a.jpg cannot be read: Input/output error"):
        qwen_model.load_data(write_rows(tmp_path, build_row("<image>?", "a.jpg")), RowRules(on_bad_row="skip"))


def test_images_are_rejected_for_a_text_model(qwen_model: LoadedVisionModel, tmp_path: Path) -> None:
    text_only = replace(qwen_model.model_description, vision=None)
    name = tiny_vision.write_image(tmp_path, "a.png", (56, 56), seed=1)

    with pytest.raises(DatasetError, match=r'line 1 contains images, but model "tiny" is trained on text only'):
        LoadedVisionModel(tmp_path, text_only, qwen_model.model).load_data(
            write_rows(tmp_path, build_row("<image>?", name))
        )


@pytest.mark.parametrize(
    "model_fields", [{"freeze": ["vision"]}, {"maxPixels": 602112}, {"minPixels": 784}, {"videoFps": 1}]
)
def test_vision_fields_are_rejected_for_a_text_model(tmp_path: Path, model_fields: dict[str, Any]) -> None:
    tokenizer = tiny_text.build_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    tiny_text.build_model(len(tokenizer)).save_pretrained(tmp_path)

    with pytest.raises(InvalidSpec, match=rf"spec.model.{next(iter(model_fields))}: .* of type qwen2, .* qwen2_vl"):
        describe_folder(tmp_path, **model_fields)


def test_pixel_limits_are_rejected_for_a_model_with_a_fixed_image_size(
    get_vision_folder: Callable[[str], Path],
) -> None:
    with pytest.raises(InvalidSpec, match=r"spec.model.maxPixels: .* scales every image to the same size"):
        describe_folder(get_vision_folder("llava"), maxPixels=602112)


def test_min_pixels_greater_than_max_pixels_are_rejected(get_vision_folder: Callable[[str], Path]) -> None:
    with pytest.raises(InvalidSpec, match="minPixels 1000000 is more than maxPixels 50176"):
        describe_folder(get_vision_folder("qwen2_vl"), minPixels=1_000_000)
