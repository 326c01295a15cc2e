"""The forecast of models that see, against what they allocate when they are shown an image."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForImageTextToText

from finetune_api.v1alpha1.lora import Lora
from finetune_api.v1alpha1.model_source import ModelSource
from finetune_trainer.errors import InvalidSpec
from finetune_trainer.memory.fake_step import Step, loss_of_every_token
from finetune_trainer.memory.model_shape import Architecture, measure_shape, measure_step
from finetune_trainer.memory.vision_sample import Sight, blank_sample
from finetune_trainer.model.load import Pretrained, describe_model
from finetune_trainer.vision.freeze import freeze_as_asked
from finetune_trainer.vision.processor import Vision
from testing.models import tiny_vision
from testing.models.allocation_tracker import Book

LENGTH = 160
FROZEN = {"language learns": ("vision", "aligner"), "all learns": ()}


@pytest.fixture(scope="module")
def described(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Pretrained]:
    folder = tmp_path_factory.mktemp("seeing")
    sources = {kind: ModelSource(name=str(tiny_vision.build(folder / kind, kind))) for kind in tiny_vision.KINDS}
    return {kind: describe_model(source, torch.device("cpu")) for kind, source in sources.items()}


def vision_of(pretrained: Pretrained) -> Vision:
    assert pretrained.vision is not None
    return pretrained.vision


@pytest.mark.parametrize("kind", tiny_vision.KINDS)
@pytest.mark.parametrize("frozen", FROZEN)
def test_a_step_allocates_what_is_forecast(described: dict[str, Pretrained], kind: str, frozen: str) -> None:
    """On CPU, in float32: attention of other kernels keeps as much as that of the forecast."""
    pretrained, vision = described[kind], vision_of(described[kind])
    sight = Sight(vision, FROZEN[frozen], blank_sample(vision, LENGTH))
    architecture = Architecture(pretrained.config, torch.float32, None, sight=sight)
    step = Step(batch=2, length=LENGTH, checkpointing=False, autocast=None, loss=loss_of_every_token)
    model = AutoModelForImageTextToText.from_config(pretrained.config)
    freeze_as_asked(model, vision, FROZEN[frozen])
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    batch = sight.batch(2)

    with Book() as book:
        loss_of_every_token(model.train()(**batch, use_cache=False).logits, batch["input_ids"]).backward()  # type: ignore[no-untyped-call]

    assert 0.97 * book.highest <= measure_step(architecture, step).total <= 1.15 * book.highest


@pytest.mark.parametrize("kind", tiny_vision.KINDS)
def test_what_is_held_is_all_of_it(described: dict[str, Pretrained], kind: str) -> None:
    pretrained, vision = described[kind], vision_of(described[kind])
    model = AutoModelForImageTextToText.from_config(pretrained.config)
    freeze_as_asked(model, vision, ("vision", "aligner"))

    shape = measure_shape(
        Architecture(
            pretrained.config,
            torch.float32,
            None,
            sight=Sight(vision, ("vision", "aligner"), blank_sample(vision, LENGTH)),
        )
    )

    sizes = {learns: sum(p.nbytes for p in model.parameters() if p.requires_grad is learns) for learns in (True, False)}
    assert (shape.trained_bytes, shape.frozen_bytes) == (sizes[True], sizes[False])
    assert shape.layer_parameters == sum(p.numel() for p in model.model.language_model.layers[0].parameters())


@pytest.mark.parametrize("kind", tiny_vision.KINDS)
def test_what_sees_keeps_its_bits_where_the_rest_has_four(described: dict[str, Pretrained], kind: str) -> None:
    pretrained, vision = described[kind], vision_of(described[kind])
    sight = Sight(vision, ("vision", "aligner"), blank_sample(vision, LENGTH))
    whole, packed = (
        measure_shape(Architecture(pretrained.config, torch.float32, Lora(r=2, quantization=bits), sight=sight))
        for bits in (None, "nf4")
    )
    layers = AutoModelForImageTextToText.from_config(pretrained.config).model.language_model.layers
    linear = sum(
        each.weight.nbytes for layer in layers for each in layer.modules() if isinstance(each, torch.nn.Linear)
    )

    assert whole.frozen_bytes - packed.frozen_bytes == pytest.approx(linear * (1 - 0.516 / 4), rel=0.02)


@pytest.mark.parametrize("kind", tiny_vision.KINDS)
def test_a_sample_has_its_length_and_an_image(described: dict[str, Pretrained], kind: str) -> None:
    vision = vision_of(described[kind])

    sample = blank_sample(vision, LENGTH)

    assert sample["input_ids"].shape == (LENGTH,)
    assert 0 < int((sample["input_ids"] == vision.seen.config.image_token_id).sum()) <= LENGTH
    assert len(sample["pixel_values"])


def test_images_of_any_size_are_as_large_as_they_may_be(described: dict[str, Pretrained], tmp_path: Path) -> None:
    folder = tiny_vision.build(tmp_path / "qwen2_vl", "qwen2_vl")
    limited = describe_model(ModelSource(name=str(folder), max_pixels=28 * 28 * 16), torch.device("cpu"))

    by_length, by_pixels = (
        int((blank_sample(vision_of(each), LENGTH)["input_ids"] == each.config.image_token_id).sum())
        for each in (described["qwen2_vl"], limited)
    )

    assert by_pixels == 16
    assert 16 < by_length <= LENGTH


def test_no_image_in_so_few_tokens(described: dict[str, Pretrained]) -> None:
    with pytest.raises(InvalidSpec, match=r"spec.dataset.maxLength: 3 tokens are fewer than the smallest image takes"):
        blank_sample(vision_of(described["llava"]), 3)
