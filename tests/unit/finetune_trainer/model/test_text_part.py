"""Tests training of the text part of models with vision and audio towers (textOnly)."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForMultimodalLM, Florence2Config, PretrainedConfig

from finetune_api.v1alpha1.job import TrainerSpec
from finetune_trainer.data.row_rendering import build_sft_renderer
from finetune_trainer.data.token_dataset import IGNORE_INDEX
from finetune_trainer.errors import DatasetError, InvalidSpec, ModelError
from finetune_trainer.memory.forecast import forecast, read_model
from finetune_trainer.model.attention_backend import choose_simulated_attention
from finetune_trainer.model.load import describe_model, load_model
from finetune_trainer.model.text_part import build_module_pattern, find_unreached_modules, is_inside
from finetune_trainer.model.varlen_attention import VARLEN
from finetune_trainer.training_plan import plan_training
from finetune_trainer.varlen_inputs import build_varlen_inputs
from testing.builders import jobs
from testing.models import tiny_text, tiny_towers, tiny_vision
from testing.models.vision_fixtures import LoadedVisionModel, describe_folder, write_rows

TOWERS = {
    "gemma4": ("model.vision_tower", "model.audio_tower", "model.embed_vision", "model.embed_audio"),
    "llama4": ("vision_model", "multi_modal_projector"),
    **{model_type: ("model.visual",) for model_type in tiny_vision.RECIPES if model_type.startswith("qwen")},
    **dict.fromkeys(("internvl", "llava", "gemma3"), ("model.vision_tower", "model.multi_modal_projector")),
}


@pytest.fixture(scope="module", params=TOWERS)
def model_type(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def folder(model_type: str, tmp_path_factory: pytest.TempPathFactory, get_vision_folder: Callable[[str], Path]) -> Path:
    if model_type in tiny_towers.CONFIGS:
        return tiny_towers.build(tmp_path_factory.mktemp(model_type), model_type)
    return get_vision_folder(model_type)


def parse_spec(folder: Path, **fields: Any) -> TrainerSpec:
    model = {"name": str(folder), "textOnly": True}
    dataset = {"train": [{"name": "/data/train.jsonl"}], "maxLength": 64}
    return jobs.parse_spec(**{"lora": None, "model": model, "dataset": dataset, **fields})


def load_trained_model(folder: Path, **fields: Any) -> Any:
    spec = parse_spec(folder, **fields)
    model_description = describe_model(spec.model, torch.device("cpu"))
    attention = choose_simulated_attention(spec, model_description.config)
    return load_model(spec, replace(model_description, attention=attention))


def compute_gradient_names(model: Any) -> set[str]:
    attention = model.config.get_text_config()._attn_implementation
    lengths = build_varlen_inputs([8]) if attention == VARLEN else {}
    model(input_ids=torch.arange(8)[None], use_cache=False, **lengths).logits.sum().backward()
    return {name for name, parameter in model.named_parameters() if parameter.grad is not None}


def find_trained_names(model: torch.nn.Module) -> set[str]:
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}


def test_all_vision_language_families_are_tested() -> None:
    assert TOWERS.keys() == tiny_vision.RECIPES.keys() | tiny_towers.CONFIGS.keys()


def test_the_frozen_modules_are_the_towers_and_their_aligners(folder: Path, model_type: str) -> None:
    model_description = describe_folder(folder, textOnly=True)

    assert model_description.frozen_modules == TOWERS[model_type]
    assert model_description.dtype is torch.float32, "the search for unreached modules does not change it"


def test_exactly_the_trained_parameters_have_gradients(folder: Path, model_type: str) -> None:
    """DDP without a search for unused parameters waits for the gradients of all trained parameters."""
    assert_trained_parameters_have_gradients(load_trained_model(folder), model_type)


@pytest.mark.parametrize("model_type", ["gemma4", "llama4", "qwen2_vl"], scope="module")
def test_adapters_of_the_text_part_have_gradients(folder: Path, model_type: str) -> None:
    assert_trained_parameters_have_gradients(load_trained_model(folder, lora={"r": 2}), model_type)


def assert_trained_parameters_have_gradients(model: Any, model_type: str) -> None:
    trained = find_trained_names(model)
    assert trained
    assert compute_gradient_names(model) == trained
    assert not any(is_inside(name.removeprefix("base_model.model."), TOWERS[model_type]) for name in trained)


def test_the_model_is_loaded_with_its_towers(folder: Path) -> None:
    model, full_model = load_trained_model(folder), AutoModelForMultimodalLM.from_pretrained(folder)

    assert type(model) is type(full_model)
    assert model.state_dict().keys() == full_model.state_dict().keys()
    assert all(torch.equal(weight, full_model.state_dict()[name]) for name, weight in model.state_dict().items())


@pytest.mark.parametrize("model_type", ["gemma4", "llama4", "qwen3_vl"], scope="module")
def test_the_forecast_counts_the_towers_as_frozen(folder: Path) -> None:
    spec, model = parse_spec(folder), load_trained_model(folder)

    result = forecast(plan_training(spec, world_size=1), read_model(spec), on_gpu=True)

    assert result.shape.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert result.shape.trained_parameters == sum(
        parameter.numel() for parameter in model.parameters() if parameter.requires_grad
    )
    assert result.shape.trained_parameters < result.shape.parameters
    assert not result.is_multimodal


def test_a_module_in_the_middle_of_the_language_model_is_frozen_if_text_does_not_reach_it() -> None:
    """The cross-attention layers of Llama 3.2 Vision are skipped for text."""
    config = build_mllama_config()

    assert find_unreached_modules(config) == (
        "model.vision_model",
        "model.language_model.layers.1",
        "model.multi_modal_projector",
    )


def build_mllama_config() -> PretrainedConfig:
    from transformers import MllamaConfig

    text = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "cross_attention_layers": [1],
        "vocab_size": 100,
        "pad_token_id": 0,
    }
    vision = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_global_layers": 1,
        "attention_heads": 4,
        "vision_output_dim": 64,
        "image_size": 56,
        "intermediate_layers_indices": [0],
    }
    return MllamaConfig(text_config=text, vision_config=vision)


def test_an_encoder_decoder_cannot_be_trained_on_text() -> None:
    with pytest.raises(ModelError, match=r"models of type florence2 cannot be trained on text alone: .* encoder"):
        find_unreached_modules(Florence2Config())


def test_the_module_pattern_matches_modules_and_submodules_only() -> None:
    pattern = build_module_pattern(("model.visual", "model.language_model.layers.1"))

    assert pattern is not None
    matched = ("model.visual", "model.visual.merger.mlp.0", "model.language_model.layers.1.q_proj")
    assert all(re.fullmatch(pattern, name) for name in matched)
    assert not any(re.fullmatch(pattern, name) for name in ("model.visual2", "model.language_model.layers.10.q_proj"))
    assert build_module_pattern(()) is None


def test_rows_with_images_are_rejected(tmp_path: Path, get_vision_folder: Callable[[str], Path]) -> None:
    folder = get_vision_folder("qwen2_vl")
    name = tiny_vision.write_image(tmp_path, "a.png", (56, 56), seed=1)
    messages = [{"role": "user", "content": "<image>?"}, {"role": "assistant", "content": "blue"}]
    text_model = LoadedVisionModel(folder, describe_folder(folder, textOnly=True), torch.nn.Identity())

    with pytest.raises(DatasetError, match=r"line 1 contains images, but model .* leave spec\.model\.textOnly out"):
        text_model.load_data(write_rows(tmp_path, {"messages": messages, "images": [name]}))


@pytest.mark.parametrize("model_type", ["llava", "qwen2_vl"], scope="module")
def test_text_rows_are_rendered_as_with_the_vision_processor(tmp_path: Path, folder: Path) -> None:
    """The tiny chat templates, like LLaVA's, render lists of content parts only."""
    rows = write_rows(tmp_path, next(tiny_text.generate_chat_rows()))

    (text_sample,), (vision_sample,) = (
        LoadedVisionModel(folder, describe_folder(folder, textOnly=text_only), torch.nn.Identity())
        .load_data(rows, method=build_sft_renderer("assistant"))
        .samples[0]
        for text_only in (True, False)
    )

    assert text_sample["input_ids"].tolist() == vision_sample["input_ids"].tolist()
    assert (text_sample["labels"] != IGNORE_INDEX).tolist() == (vision_sample["labels"] != IGNORE_INDEX).tolist()


@pytest.mark.parametrize(
    "field", [{"freeze": []}, {"maxPixels": 784}, {"maxTiles": 2}, {"videoFps": 1}], ids=lambda field: next(iter(field))
)
def test_vision_fields_are_rejected_by_name(field: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"textOnly trains no images and videos; remove {next(iter(field))}"):
        parse_spec(Path("/model"), model={"name": "/model", "textOnly": True, **field})


def test_text_only_is_rejected_for_a_text_model(tmp_path: Path) -> None:
    tokenizer = tiny_text.build_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    tiny_text.build_model(len(tokenizer)).save_pretrained(tmp_path)

    with pytest.raises(InvalidSpec, match=r"spec\.model\.textOnly: .* of type qwen2, which has no vision, audio or"):
        describe_folder(tmp_path, textOnly=True)
