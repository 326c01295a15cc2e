"""What a model that sees reads, what it learns, and what an image that shows nothing changes: nothing."""

import base64
import copy
import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, LlavaProcessor

from finetune_api.v1alpha1.lora import Lora
from finetune_trainer.data.load import Method
from finetune_trainer.data.row_filter import Rules
from finetune_trainer.data.token_dataset import IGNORED
from finetune_trainer.data_sources.media import Kind
from finetune_trainer.errors import DatasetError, InvalidSpec
from finetune_trainer.methods.sft import predict, render_sample
from finetune_trainer.model.lora import add_adapters
from finetune_trainer.vision.families import FAMILIES, Family
from finetune_trainer.vision.freeze import freeze, frozen_groups, frozen_modules, group_of, trains_sight
from testing.fakes.unreadable_file import UNREADABLE
from testing.models import tiny_text as tiny
from testing.models import tiny_vision
from testing.models.vision_fixtures import Loaded, assert_equal_but_for_rounding, describe, gradients_of, write

KINDS = tuple(tiny_vision.KINDS)


@pytest.fixture(scope="module", params=KINDS)
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    folder = tiny_vision.build(tmp_path_factory.mktemp(request.param), request.param)
    return Loaded(folder, describe(folder), AutoModelForImageTextToText.from_pretrained(folder))


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    folder = tiny_vision.build(tmp_path_factory.mktemp("qwen"))
    return Loaded(folder, describe(folder), AutoModelForImageTextToText.from_pretrained(folder))


def asked(question: str, *names: str, answer: str = "It is blue.") -> dict[str, Any]:
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return {"messages": messages, "images": list(names)}


def test_no_image_token_and_no_word_of_the_user_is_learned(loaded: Loaded, tmp_path: Path) -> None:
    data = loaded.data(tiny_vision.rows(tmp_path, 6, images=lambda number: number % 3))
    image_token = loaded.model.config.image_token_id
    conversations = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]

    for index, conversation in enumerate(conversations):
        (row,) = data.samples[index]
        learned = row["labels"][row["labels"] != IGNORED]

        assert image_token not in learned
        assert int((row["input_ids"] == image_token).sum()) > 0 or not conversation.get("images")
        assert loaded.pretrained.tokenizer.decode(learned) == conversation["messages"][1]["content"] + "<|im_end|>"


def test_no_image_token_is_learned_where_everything_else_is(loaded: Loaded, tmp_path: Path) -> None:
    name = tiny_vision.draw(tmp_path, "a.png", (56, 84), seed=1)
    everything = partial(render_sample, loss_on="all")
    (row,) = loaded.data(write(tmp_path, asked("<image>?", name)), method=Method("all", everything)).samples[0]

    learned = row["labels"][1:] != IGNORED
    assert not learned[row["input_ids"][1:] == loaded.model.config.image_token_id].any()
    assert learned[-10:].all()


def test_an_image_has_as_many_tokens_as_the_model_makes_of_it(loaded: Loaded, tmp_path: Path) -> None:
    """The models raise an error where they differ."""
    names = [tiny_vision.draw(tmp_path, f"{size}.png", size, seed=1) for size in ((28, 28), (200, 60), (90, 300))]
    data = loaded.data(write(tmp_path, *(asked("<image>?", name) for name in names), asked("<image>" * 3, *names)))
    collate = loaded.collate()

    for index in range(4):
        assert predict(loaded.model, collate([data.samples[index]])).isfinite().all()
    together = collate([data.samples[index] for index in range(4)])
    assert predict(loaded.model, together).isfinite().all()


def test_an_image_is_seen(loaded: Loaded, tmp_path: Path) -> None:
    names = [tiny_vision.draw(tmp_path, f"{seed}.png", (56, 56), seed=seed) for seed in range(2)]
    data = loaded.data(write(tmp_path, *(asked("<image>?", name) for name in names)))
    collate = loaded.collate()

    one, other = (predict(loaded.model, collate([data.samples[index]])) for index in range(2))

    assert (one - other).abs().max() > 1e-4


def test_an_image_that_shows_nothing_changes_no_logit_and_no_gradient(loaded: Loaded, tmp_path: Path) -> None:
    data = loaded.data(tiny_vision.rows(tmp_path, 4, images=lambda number: number // 3))
    rows = [data.samples[index] for index in range(3)]
    real = gradients_of(loaded.model, loaded.collate(Kind.IMAGE)([data.samples[3]]))
    plain, seeing = loaded.collate()(rows), loaded.collate(Kind.IMAGE)(rows)
    assert "pixel_values" in seeing
    assert "pixel_values" not in plain

    expected, found = gradients_of(loaded.model, plain), gradients_of(loaded.model, seeing)
    assert expected.keys() < found.keys()
    assert found.keys() == real.keys()  # it runs through all that a real image runs through
    for name, gradient in found.items():
        if name in expected:
            assert_equal_but_for_rounding(gradient, expected[name])
        else:
            assert group_of(name, FAMILIES[loaded.model.config.model_type]) != "language"
            assert gradient.abs().max() == 0


@pytest.mark.parametrize(
    ("frozen", "learning"),
    [
        pytest.param(None, {"language"}, id="as usual"),
        pytest.param((), {"vision", "aligner", "language"}, id="nothing frozen"),
        pytest.param(("vision",), {"aligner", "language"}, id="vision"),
        pytest.param(("language",), {"vision", "aligner"}, id="language"),
        pytest.param(("vision", "language"), {"aligner"}, id="all but the aligner"),
        pytest.param(("aligner", "language"), {"vision"}, id="all but vision"),
    ],
)
def test_adapters_stay_inside_what_is_trained(
    loaded: Loaded, frozen: tuple[str, ...] | None, learning: set[str]
) -> None:
    family, model = FAMILIES[loaded.model.config.model_type], copy_of(loaded.model)
    groups = frozen_groups(frozen)
    freeze(model, family, groups)

    assert {group_of(name, family) for name, each in model.named_parameters() if each.requires_grad} == learning

    learning = learning - without_linear_layers(family, model)
    if not learning:
        with pytest.raises(InvalidSpec, match=r"spec\.lora\.targetModules"):
            add_adapters(model, Lora(), seed=1, without=frozen_modules(family, groups))
        return
    adapted = add_adapters(model, Lora(), seed=1, without=frozen_modules(family, groups))
    names = {name.removeprefix("base_model.model.") for name, each in adapted.named_parameters() if each.requires_grad}
    assert {group_of(name, family) for name in names} == learning
    assert trains_sight(adapted, family) == bool(learning - {"language"})


def test_what_no_image_runs_through_is_not_trained(loaded: Loaded, tmp_path: Path) -> None:
    """DDP would wait for its gradients: of LLaVA the last layer of CLIP, and the norm behind it."""
    family = FAMILIES[loaded.model.config.model_type]
    data = loaded.data(tiny_vision.rows(tmp_path, 2, images=lambda number: 1))
    model = copy_of(loaded.model)
    freeze(model, family, (), unreached=family.unreached(model.config))

    reached = gradients_of(model, loaded.collate(Kind.IMAGE)([data.samples[index] for index in range(2)])).keys()

    assert {name for name, each in model.named_parameters() if each.requires_grad} == set(reached)


def without_linear_layers(family: Family, model: torch.nn.Module) -> set[str]:
    """Gemma 3's aligner is a bare matrix, which adapters do not fit."""
    linear = {group_of(name, family) for name, each in model.named_modules() if isinstance(each, torch.nn.Linear)}
    return {"vision", "aligner", "language"} - linear


def copy_of(model: torch.nn.Module) -> torch.nn.Module:
    return copy.deepcopy(model)


def test_something_must_be_left_to_train() -> None:
    with pytest.raises(InvalidSpec, match="all of vision, aligner and language are frozen"):
        frozen_groups(("vision", "aligner", "language"))


def test_llavas_words_are_those_of_its_own_processor(tmp_path: Path) -> None:
    """Its processor needs no torchvision, so it can be asked here."""
    folder = tiny_vision.build(tmp_path / "model", "llava")
    pretrained = describe(folder)
    assert pretrained.vision is not None
    own = LlavaProcessor(
        image_processor=pretrained.vision.seen.processor,
        tokenizer=pretrained.tokenizer,
        patch_size=14,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
    )
    name = tiny_vision.draw(tmp_path, "a.png", (90, 60), seed=1)
    data = Loaded(folder, pretrained, torch.nn.Identity()).data(write(tmp_path, asked("<image>what?", name)))

    with Image.open(tmp_path / name) as image:
        text = "<|im_start|>user\n<image>\nwhat?<|im_end|>\n<|im_start|>assistant\nIt is blue.<|im_end|>\n"
        expected = own(text=text, images=image, return_tensors="pt")

    (row,) = data.samples[0]
    assert row["input_ids"].tolist() == expected["input_ids"][0].tolist()
    torch.testing.assert_close(row["pixel_values"], expected["pixel_values"])


@pytest.mark.parametrize(
    ("size", "tokens"),
    [
        pytest.param((1000, 1000), 9, id="larger"),
        pytest.param((28, 28), 4, id="smaller"),
        pytest.param((56, 84), 6, id="between"),
    ],
)
def test_images_are_brought_between_min_and_max_pixels(tmp_path: Path, size: tuple[int, int], tokens: int) -> None:
    """Qwen2-VL makes one token of 784 pixels."""
    folder = tiny_vision.build(tmp_path / "model")
    vision = describe(folder, maxPixels=9 * 784, minPixels=2 * 784).vision
    assert vision is not None

    assert vision.write_size(size).count("<|image_pad|>") == tokens


def test_turned_photos_are_counted_as_they_are_seen(qwen: Loaded, tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by a quarter
    Image.new("RGB", (28 * 8, 28 * 3)).save(tmp_path / "lying.jpg", exif=exif)
    data = qwen.data(write(tmp_path, asked("<image>?", "lying.jpg")))

    assert data.samples[0][0]["image_grid_thw"].tolist() == [[1, 16, 6]]
    assert predict(qwen.model, qwen.collate()([data.samples[0]])).isfinite().all()


def test_length_is_counted_with_image_tokens_and_truncation_keeps_an_image_whole(qwen: Loaded, tmp_path: Path) -> None:
    name = tiny_vision.draw(tmp_path, "a.png", (140, 140), seed=1)  # 25 tokens
    after = {"role": "user", "content": "<image>"}
    row = asked("<image>?", name, name)
    row["messages"] = [*row["messages"], after, row["messages"][1]]
    whole = qwen.data(write(tmp_path, row)).train
    length = int(whole.lengths[0])
    assert length > 2 * 25

    cut = qwen.data(tmp_path / "rows.jsonl", Rules(max_length=length - 20, overlong="truncate"))
    (kept,) = cut.samples[0]
    assert int((kept["input_ids"] == qwen.model.config.image_token_id).sum()) == 25
    assert len(kept["input_ids"]) < length - 20
    assert kept["image_grid_thw"].tolist() == [[1, 10, 10]]
    with pytest.raises(DatasetError, match=f"longer than {length - 1} tokens"):
        qwen.data(tmp_path / "rows.jsonl", Rules(max_length=length - 1))


def test_images_in_rows_are_kept_with_their_tokens(qwen: Loaded, tmp_path: Path) -> None:
    name = tiny_vision.draw(tmp_path, "a.png", (56, 84), seed=1)
    url = "data:image/png;base64," + base64.b64encode((tmp_path / name).read_bytes()).decode()
    inside = asked("")
    inside["messages"][0]["content"] = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "?"}]
    data = qwen.data(write(tmp_path, inside, asked("<image>?", name)))

    (one,), (other,) = data.samples[0], data.samples[1]
    assert one.keys() == other.keys()
    for each in one:
        assert torch.equal(one[each], other[each])


def _missing(folder: Path) -> dict[str, Any]:
    return asked("<image>", "nowhere.png")


def _no_image(folder: Path) -> dict[str, Any]:
    (folder / "text.png").write_text("no image")
    return asked("<image>", "text.png")


def _a_folder(folder: Path) -> dict[str, Any]:
    return asked("<image>", ".")


def _too_long(folder: Path) -> dict[str, Any]:
    Image.new("L", (1000, 2)).save(folder / "line.png")
    return asked("<image>", "line.png")


def _a_word(folder: Path) -> dict[str, Any]:
    return asked("what is <|image_pad|>?")


def _a_tag(folder: Path) -> dict[str, Any]:
    return asked("<image>what is this?")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (_missing, r"image .*nowhere.png does not exist; correct its path"),
        (_no_image, r"image .*text.png is no image that can be read; replace it"),
        (_a_folder, r"does not exist; correct its path"),
        (_too_long, r"line.png cannot be read \(absolute aspect ratio"),
        (_a_word, r"<\|image_pad\|> 1 times more than there are images"),
        (_a_tag, r"<image> 1 times more than there are images; give the images in a column images"),
    ],
)
def test_an_image_that_cannot_be_shown_is_a_bad_row(
    qwen: Loaded, tmp_path: Path, row: Callable[[Path], dict[str, Any]], message: str
) -> None:
    good = asked("no image")
    rows = write(tmp_path, good, row(tmp_path))

    with pytest.raises(DatasetError, match=rf"rows.jsonl line 2: .*{message}"):
        qwen.data(rows)
    assert len(qwen.data(rows, Rules(on_bad_row="skip")).train) == 1


def test_a_file_that_breaks_off_is_named_where_it_is_read(qwen: Loaded, tmp_path: Path) -> None:
    """Of a JPEG the beginning tells the size; the whole is not read before it is needed."""
    whole = tmp_path / tiny_vision.draw(tmp_path, "a.jpg", (280, 280), seed=1)
    whole.write_bytes(whole.read_bytes()[:2000])
    data = qwen.data(write(tmp_path, asked("<image>?", "a.jpg")))

    with pytest.raises(DatasetError, match=r"rows.jsonl line 1: image .*a.jpg cannot be read"):
        data.samples[0]


def test_an_image_that_a_file_system_did_not_give_is_not_skipped(qwen: Loaded, tmp_path: Path) -> None:
    (tmp_path / "a.jpg").symlink_to(UNREADABLE)

    with pytest.raises(OSError, match="Input/output error"):
        qwen.data(write(tmp_path, asked("<image>?", "a.jpg")), Rules(on_bad_row="skip"))


def test_a_model_that_reads_is_shown_no_images(qwen: Loaded, tmp_path: Path) -> None:
    blind = replace(qwen.pretrained, vision=None)
    name = tiny_vision.draw(tmp_path, "a.png", (56, 56), seed=1)

    with pytest.raises(DatasetError, match=r'line 1 shows images, but model "tiny" only reads'):
        Loaded(tmp_path, blind, qwen.model).data(write(tmp_path, asked("<image>?", name)))


@pytest.mark.parametrize("field", [{"freeze": ["vision"]}, {"maxPixels": 602112}, {"minPixels": 784}, {"videoFps": 1}])
def test_fields_of_sight_are_refused_for_a_model_that_reads(tmp_path: Path, field: dict[str, Any]) -> None:
    tokenizer = tiny.build_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    tiny.build_model(len(tokenizer)).save_pretrained(tmp_path)

    with pytest.raises(InvalidSpec, match=rf"spec.model.{next(iter(field))}: .* of type qwen2, .* qwen2_vl"):
        describe(tmp_path, **field)


def test_pixels_are_refused_where_every_image_has_the_same_size(tmp_path: Path) -> None:
    tiny_vision.build(tmp_path, "llava")

    with pytest.raises(InvalidSpec, match=r"spec.model.maxPixels: .* sees every image at the same size"):
        describe(tmp_path, maxPixels=602112)


def test_a_range_of_pixels_holds_with_the_models_own_end(tmp_path: Path) -> None:
    tiny_vision.build(tmp_path)

    with pytest.raises(InvalidSpec, match="minPixels 1000000 is more than maxPixels 50176"):
        describe(tmp_path, minPixels=1_000_000)
