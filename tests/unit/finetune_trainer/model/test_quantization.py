"""Tests 4-bit quantization of weights, and the error if bitsandbytes is missing."""

import importlib.util
from collections.abc import Callable
from pathlib import Path

import bitsandbytes
import pytest
import torch
from bitsandbytes.nn.modules import Linear4bit

from finetune_api.v1alpha1.model_source import ModelSource
from finetune_trainer.errors import InvalidSpec
from finetune_trainer.metrics.flops import estimate_flops
from finetune_trainer.model.load import ModelDescription, describe_model, load_weights
from finetune_trainer.model.parameter_size import get_full_shape
from finetune_trainer.model.quantization import build_nf4_config, check_quantizable
from finetune_trainer.startup_log import describe_weights
from finetune_trainer.vision.freeze import find_group
from testing.models import tiny_families, tiny_text, tiny_vision

WITH_EXPERTS = ("qwen3_vl_moe", "qwen3_5_moe")


def describe_folder(folder: Path) -> ModelDescription:
    return describe_model(ModelSource(name=str(folder)), torch.device("cpu"))


@pytest.fixture
def text_model(tmp_path: Path) -> Path:
    return tiny_text.build(tmp_path, rows=1, eval_rows=1).model


def find_linear_groups(model: torch.nn.Module, folder: Path) -> dict[bool, set[str]]:
    """Return the groups of linear layers, with the key True for quantized layers and False for others."""
    vision = describe_folder(folder).vision
    assert vision is not None
    groups: dict[bool, set[str]] = {True: set(), False: set()}
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and not name.endswith("lm_head"):
            groups[isinstance(module, Linear4bit)].add(find_group(name, vision.family))
    return groups


@pytest.mark.parametrize(
    "model_type", [model_type for model_type in tiny_vision.RECIPES if model_type not in WITH_EXPERTS]
)
def test_only_the_language_model_is_quantized(get_vision_folder: Callable[[str], Path], model_type: str) -> None:
    folder = get_vision_folder(model_type)

    groups = find_linear_groups(load_weights(describe_folder(folder), torch.float32, quantize=True), folder)

    assert groups[True] == {"language"}
    assert "language" not in groups[False]


def test_the_parameter_count_of_quantized_weights_uses_their_full_shape(text_model: Path) -> None:
    model_description = describe_folder(text_model)
    full, quantized = (load_weights(model_description, torch.float32, quantize=quantize) for quantize in (False, True))

    assert sum(weight.nbytes for weight in quantized.parameters()) < 0.6 * sum(
        weight.nbytes for weight in full.parameters()
    )
    assert [get_full_shape(weight) for weight in quantized.parameters()] == [
        weight.shape for weight in full.parameters()
    ]
    for model in (full, quantized):
        model.requires_grad_(requires_grad=False)
    assert list(describe_weights(quantized, None)) == list(describe_weights(full, None))
    assert estimate_flops(quantized, has_reference=False) == estimate_flops(full, has_reference=False)


def test_quantization_without_bitsandbytes_raises_invalid_spec(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)

    with pytest.raises(InvalidSpec, match=r"spec\.lora\.quantization: this image has no bitsandbytes"):
        build_nf4_config(torch.float32, None)


def test_evaluation_does_not_change_quantized_weights(text_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU with AVX512-BF16, bitsandbytes would repack the weights."""
    monkeypatch.setattr(bitsandbytes.nn.modules, "has_avx512bf16", lambda: True)
    model = load_weights(describe_folder(text_model), torch.float32, quantize=True)
    originals = [weight.clone() for weight in model.parameters()]

    model.eval()
    with torch.no_grad():
        model(input_ids=torch.arange(8).view(1, -1))

    assert all(torch.equal(weight, original) for weight, original in zip(model.parameters(), originals, strict=True))


def test_towers_are_not_quantized_in_text_training(get_vision_folder: Callable[[str], Path]) -> None:
    folder = get_vision_folder("qwen2_vl")
    source = ModelSource(name=str(folder), text_only=True)

    model = load_weights(describe_model(source, torch.device("cpu")), torch.bfloat16, quantize=True)

    groups = find_linear_groups(model, folder)
    assert groups == {True: {"language"}, False: {"vision", "aligner"}}


@pytest.mark.parametrize("model_type", [*WITH_EXPERTS, "qwen3_moe"])
def test_fused_experts_are_not_quantized_but_rejected(tmp_path: Path, model_type: str) -> None:
    folder = (tiny_vision if model_type in WITH_EXPERTS else tiny_families).build(tmp_path, model_type)
    message = (
        r"spec\.lora\.quantization: nf4 quantizes linear layers, but the experts of model .* leave quantization out"
    )

    with pytest.raises(InvalidSpec, match=message):
        load_weights(describe_folder(folder), torch.bfloat16, quantize=True)
    with pytest.raises(InvalidSpec, match=message):
        check_quantizable(str(folder), describe_folder(folder).config)
