"""Compare the forecasts of vision-language models with what they allocate for an image."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForImageTextToText

from finetune_api.v1alpha1.lora import Lora
from finetune_api.v1alpha1.model_source import ModelSource
from finetune_trainer.errors import InvalidSpec
from finetune_trainer.memory.fake_step import SimulatedStep, unmasked_token_loss
from finetune_trainer.memory.model_shape import Architecture, measure_shape, measure_step_peak
from finetune_trainer.memory.vision_sample import VisionSample, build_blank_sample
from finetune_trainer.model.load import Pretrained, describe_model
from finetune_trainer.vision.freeze import freeze_groups
from finetune_trainer.vision.processor import VisionProcessor
from testing.models import tiny_vision
from testing.models.allocation_tracker import AllocationTracker

LENGTH = 160
FROZEN = {"only language trained": ("vision", "aligner"), "everything trained": ()}


@pytest.fixture(scope="module")
def described(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Pretrained]:
    folder = tmp_path_factory.mktemp("vision_language")
    sources = {kind: ModelSource(name=str(tiny_vision.build(folder / kind, kind))) for kind in tiny_vision.RECIPES}
    return {kind: describe_model(source, torch.device("cpu")) for kind, source in sources.items()}


def vision_of(pretrained: Pretrained) -> VisionProcessor:
    assert pretrained.vision is not None
    return pretrained.vision


@pytest.mark.parametrize("kind", tiny_vision.RECIPES)
@pytest.mark.parametrize("frozen", FROZEN)
def test_a_step_allocates_the_forecast_bytes(described: dict[str, Pretrained], kind: str, frozen: str) -> None:
    """On CPU in float32: its attention saves as much for backward as the fused kernel of the forecast."""
    pretrained, vision = described[kind], vision_of(described[kind])
    sample = VisionSample(vision, FROZEN[frozen], build_blank_sample(vision, LENGTH))
    architecture = Architecture(pretrained.config, torch.float32, None, vision_sample=sample)
    step = SimulatedStep(batch=2, length=LENGTH, checkpointing=False, autocast=None, loss=unmasked_token_loss)
    model = AutoModelForImageTextToText.from_config(pretrained.config)
    freeze_groups(model, vision, FROZEN[frozen])
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    batch = sample.build_batch(2)

    with AllocationTracker() as book:
        unmasked_token_loss(model.train()(**batch, use_cache=False).logits, batch["input_ids"]).backward()  # type: ignore[no-untyped-call]

    assert 0.97 * book.peak_bytes <= measure_step_peak(architecture, step).total <= 1.15 * book.peak_bytes


@pytest.mark.parametrize("kind", tiny_vision.RECIPES)
def test_forecast_model_states_are_those_of_the_real_model(described: dict[str, Pretrained], kind: str) -> None:
    pretrained, vision = described[kind], vision_of(described[kind])
    model = AutoModelForImageTextToText.from_config(pretrained.config)
    freeze_groups(model, vision, ("vision", "aligner"))

    shape = measure_shape(
        Architecture(
            pretrained.config,
            torch.float32,
            None,
            vision_sample=VisionSample(vision, ("vision", "aligner"), build_blank_sample(vision, LENGTH)),
        )
    )

    trained_bytes = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    frozen_bytes = sum(p.nbytes for p in model.parameters() if not p.requires_grad)
    assert (shape.trained_bytes, shape.frozen_bytes) == (trained_bytes, frozen_bytes)
    assert shape.layer_parameters == sum(p.numel() for p in model.model.language_model.layers[0].parameters())


@pytest.mark.parametrize("kind", tiny_vision.RECIPES)
def test_the_vision_tower_is_not_quantized(described: dict[str, Pretrained], kind: str) -> None:
    pretrained, vision = described[kind], vision_of(described[kind])
    sample = VisionSample(vision, ("vision", "aligner"), build_blank_sample(vision, LENGTH))
    full, quantized = (
        measure_shape(Architecture(pretrained.config, torch.float32, lora, vision_sample=sample))
        for lora in (Lora(r=2), Lora(r=2, quantization="nf4"))
    )
    layers = AutoModelForImageTextToText.from_config(pretrained.config).model.language_model.layers
    linear = sum(
        each.weight.nbytes for layer in layers for each in layer.modules() if isinstance(each, torch.nn.Linear)
    )

    assert full.frozen_bytes - quantized.frozen_bytes == pytest.approx(linear * (1 - 0.516 / 4), rel=0.02)


@pytest.mark.parametrize("kind", tiny_vision.RECIPES)
def test_a_blank_sample_has_the_requested_length_and_an_image(described: dict[str, Pretrained], kind: str) -> None:
    vision = vision_of(described[kind])

    sample = build_blank_sample(vision, LENGTH)

    assert sample["input_ids"].shape == (LENGTH,)
    assert 0 < int((sample["input_ids"] == vision.handles.config.image_token_id).sum()) <= LENGTH
    assert len(sample["pixel_values"])


def test_an_image_of_any_size_is_limited_by_length_and_max_pixels(
    described: dict[str, Pretrained], tmp_path: Path
) -> None:
    folder = tiny_vision.build(tmp_path / "qwen2_vl", "qwen2_vl")
    limited = describe_model(ModelSource(name=str(folder), max_pixels=28 * 28 * 16), torch.device("cpu"))

    by_length, by_pixels = (
        int((build_blank_sample(vision_of(each), LENGTH)["input_ids"] == each.config.image_token_id).sum())
        for each in (described["qwen2_vl"], limited)
    )

    assert by_pixels == 16
    assert 16 < by_length <= LENGTH


def test_a_length_too_short_for_any_image_is_an_error(described: dict[str, Pretrained]) -> None:
    with pytest.raises(InvalidSpec, match=r"spec.dataset.maxLength: 3 tokens are fewer than the smallest image needs"):
        build_blank_sample(vision_of(described["llava"]), 3)
