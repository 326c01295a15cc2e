"""Compare the memory forecast of vision-language models with the bytes that they really allocate."""

from collections.abc import Callable
from copy import deepcopy
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForImageTextToText

from finetune_api.v1alpha1.lora import Lora
from finetune_api.v1alpha1.model_source import ModelSource
from finetune_trainer.errors import InvalidSpec
from finetune_trainer.memory.fake_step import SimulatedStep, select_all_tokens
from finetune_trainer.memory.model_shape import Architecture, measure_shape, measure_step_peak
from finetune_trainer.memory.vision_sample import VisionSample, build_blank_sample, find_equal_tower_layers
from finetune_trainer.model.load import ModelDescription, describe_model
from finetune_trainer.model.tiled_losses import compute_losses
from finetune_trainer.vision.freeze import freeze_groups
from finetune_trainer.vision.processor import VisionProcessor
from testing.models import tiny_vision
from testing.models.allocation_tracker import AllocationTracker

LENGTH = 160
FROZEN = {"only language trained": ("vision", "aligner"), "everything trained": ()}


@pytest.fixture(scope="module")
def pretrained_models(get_vision_folder: Callable[[str], Path]) -> dict[str, ModelDescription]:
    sources = {recipe: ModelSource(name=str(get_vision_folder(recipe))) for recipe in tiny_vision.RECIPES}
    return {recipe: describe_model(source, torch.device("cpu")) for recipe, source in sources.items()}


def get_vision(model_description: ModelDescription) -> VisionProcessor:
    assert model_description.vision is not None
    return model_description.vision


@pytest.mark.parametrize(
    ("recipe", "training_scope"),
    [
        *((recipe, "everything trained") for recipe in tiny_vision.RECIPES),
        ("qwen3_vl", "only language trained"),  # its tower passes features to several layers
        ("gemma3", "only language trained"),
    ],
)
def test_step_allocates_the_forecast_bytes(
    pretrained_models: dict[str, ModelDescription], recipe: str, training_scope: str
) -> None:
    """CPU attention in float32 saves as many bytes for the backward pass as the simulated fused kernel."""
    model_description, vision = pretrained_models[recipe], get_vision(pretrained_models[recipe])
    sample = VisionSample(vision, FROZEN[training_scope], build_blank_sample(vision, LENGTH))
    architecture = Architecture(model_description.config, torch.float32, None, vision_sample=sample)
    step = SimulatedStep(batch=2, length=LENGTH, recomputation_interval=None, autocast=None)
    model = AutoModelForImageTextToText.from_config(model_description.config)
    freeze_groups(model, vision, FROZEN[training_scope])
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    batch = sample.build_batch(2)

    with AllocationTracker() as tracker:
        losses, _ = compute_losses(model.train(), {**batch, "use_cache": False}, select_all_tokens(batch["input_ids"]))
        losses.sum().backward()  # type: ignore[no-untyped-call]

    assert 0.97 * tracker.peak_bytes <= measure_step_peak(architecture, step).total <= 1.15 * tracker.peak_bytes


@pytest.mark.parametrize(("recipe", "lora", "interval"), [("qwen2_vl", Lora(r=2), 2), ("internvl", None, None)])
def test_peak_extrapolated_from_some_layers_of_the_tower_equals_that_of_all(
    pretrained_models: dict[str, ModelDescription],
    recipe: str,
    lora: Lora | None,
    interval: int | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model_description, vision = pretrained_models[recipe], get_vision(pretrained_models[recipe])
    config = deepcopy(model_description.config)
    setattr(config.vision_config, "depth" if hasattr(config.vision_config, "depth") else "num_hidden_layers", 7)
    sample = VisionSample(vision, (), build_blank_sample(vision, LENGTH))
    step = SimulatedStep(batch=2, length=LENGTH, recomputation_interval=interval, autocast=torch.bfloat16)
    architecture = Architecture(config, torch.float32, lora, vision_sample=sample)
    layers = find_equal_tower_layers(architecture.full_model, vision)
    assert layers is not None
    assert len(layers) == 7
    extrapolated = measure_step_peak(architecture, step)

    monkeypatch.setattr("finetune_trainer.memory.model_shape.find_equal_tower_layers", lambda *_: None)

    assert measure_step_peak(architecture, step) == extrapolated


@pytest.mark.parametrize("recipe", ["qwen2_5_vl", "qwen3_vl", "llava"])
def test_layers_of_a_tower_that_differ_are_not_truncated(
    pretrained_models: dict[str, ModelDescription], recipe: str
) -> None:
    model_description, vision = pretrained_models[recipe], get_vision(pretrained_models[recipe])
    sample = VisionSample(vision, (), build_blank_sample(vision, LENGTH))
    architecture = Architecture(model_description.config, torch.float32, None, vision_sample=sample)

    assert find_equal_tower_layers(architecture.full_model, vision) is None


@pytest.mark.parametrize("recipe", tiny_vision.RECIPES)
def test_forecast_model_states_equal_the_real_model_states(
    pretrained_models: dict[str, ModelDescription], recipe: str
) -> None:
    model_description, vision = pretrained_models[recipe], get_vision(pretrained_models[recipe])
    model = AutoModelForImageTextToText.from_config(model_description.config)
    freeze_groups(model, vision, ("vision", "aligner"))

    shape = measure_shape(
        Architecture(
            model_description.config,
            torch.float32,
            None,
            vision_sample=VisionSample(vision, ("vision", "aligner"), build_blank_sample(vision, LENGTH)),
        )
    )

    trained_bytes = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    frozen_bytes = sum(p.nbytes for p in model.parameters() if not p.requires_grad)
    assert (shape.trained_bytes, shape.frozen_bytes) == (trained_bytes, frozen_bytes)
    layers = model.model.language_model.layers
    assert shape.layer_parameters == max(sum(p.numel() for p in layer.parameters()) for layer in layers)


@pytest.mark.parametrize("recipe", [name for name in tiny_vision.RECIPES if not name.endswith("_moe")])
def test_vision_tower_is_not_quantized(pretrained_models: dict[str, ModelDescription], recipe: str) -> None:
    model_description, vision = pretrained_models[recipe], get_vision(pretrained_models[recipe])
    sample = VisionSample(vision, ("vision", "aligner"), build_blank_sample(vision, LENGTH))
    full_shape, quantized_shape = (
        measure_shape(Architecture(model_description.config, torch.float32, lora, vision_sample=sample))
        for lora in (Lora(r=2), Lora(r=2, quantization="nf4"))
    )
    layers = AutoModelForImageTextToText.from_config(model_description.config).model.language_model.layers
    linear = sum(
        module.weight.nbytes for layer in layers for module in layer.modules() if isinstance(module, torch.nn.Linear)
    )

    assert full_shape.frozen_bytes - quantized_shape.frozen_bytes == pytest.approx(linear * (1 - 0.516 / 4), rel=0.02)


@pytest.mark.parametrize("recipe", tiny_vision.RECIPES)
def test_blank_sample_has_the_requested_length_and_an_image(
    pretrained_models: dict[str, ModelDescription], recipe: str
) -> None:
    vision = get_vision(pretrained_models[recipe])

    sample = build_blank_sample(vision, LENGTH)

    assert sample["input_ids"].shape == (LENGTH,)
    assert 0 < int((sample["input_ids"] == vision.components.config.image_token_id).sum()) <= LENGTH
    assert len(sample["pixel_values"])


def test_image_size_is_limited_by_length_and_max_pixels(
    pretrained_models: dict[str, ModelDescription], get_vision_folder: Callable[[str], Path]
) -> None:
    folder = get_vision_folder("qwen2_vl")
    limited = describe_model(ModelSource(name=str(folder), max_pixels=28 * 28 * 16), torch.device("cpu"))

    length_limited_size, pixel_limited_size = (
        int((build_blank_sample(get_vision(model), LENGTH)["input_ids"] == model.config.image_token_id).sum())
        for model in (pretrained_models["qwen2_vl"], limited)
    )

    assert pixel_limited_size == 16
    assert 16 < length_limited_size <= LENGTH


def test_image_size_is_limited_by_max_tiles(get_vision_folder: Callable[[str], Path]) -> None:
    folder = get_vision_folder("internvl")
    tokens = []
    for max_tiles in (2, 6):
        model_description = describe_model(ModelSource(name=str(folder), max_tiles=max_tiles), torch.device("cpu"))
        sample = build_blank_sample(get_vision(model_description), LENGTH)
        tokens.append(int((sample["input_ids"] == model_description.config.image_token_id).sum()))

    assert tokens == [4 * (2 + 1), 4 * (6 + 1)]  # four tokens per tile, and one tile for the whole image


def test_length_too_short_for_any_image_is_rejected(pretrained_models: dict[str, ModelDescription]) -> None:
    with pytest.raises(InvalidSpec, match=r"spec.dataset.maxLength: 3 tokens are fewer than the smallest image needs"):
        build_blank_sample(get_vision(pretrained_models["llava"]), 3)
