"""Test the quantization of weights to 4 bits: which are quantized, and the error without bitsandbytes."""

import importlib.util
from pathlib import Path

import bitsandbytes
import pytest
import torch
from bitsandbytes.nn.modules import Linear4bit

from finetune_api.v1alpha1.model_source import ModelSource
from finetune_trainer.errors import InvalidSpec
from finetune_trainer.metrics.flops import estimate_flops
from finetune_trainer.model.load import Pretrained, describe_model, load_weights
from finetune_trainer.model.parameter_size import full_shape
from finetune_trainer.model.quantization import nf4_config
from finetune_trainer.startup_log import describe_weights
from finetune_trainer.vision.freeze import find_group
from testing.models import tiny_text, tiny_vision


def describe(folder: Path) -> Pretrained:
    return describe_model(ModelSource(name=str(folder)), torch.device("cpu"))


@pytest.fixture
def text_model(tmp_path: Path) -> Path:
    return tiny_text.build(tmp_path, rows=1, eval_rows=1).model


def linear_groups(model: torch.nn.Module, folder: Path) -> dict[bool, set[str]]:
    """Return the parameter groups of the linear layers, by whether they are quantized."""
    vision = describe(folder).vision
    assert vision is not None
    groups: dict[bool, set[str]] = {True: set(), False: set()}
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and not name.endswith("lm_head"):
            groups[isinstance(module, Linear4bit)].add(find_group(name, vision.family))
    return groups


@pytest.mark.parametrize("kind", tiny_vision.RECIPES)
def test_only_the_language_model_is_quantized(tmp_path: Path, kind: str) -> None:
    folder = tiny_vision.build(tmp_path / kind, kind)

    groups = linear_groups(load_weights(describe(folder), torch.float32, quantize=True), folder)

    assert groups[True] == {"language"}
    assert "language" not in groups[False]


def test_quantized_weights_count_with_their_full_shape(text_model: Path) -> None:
    pretrained = describe(text_model)
    full, quantized = (load_weights(pretrained, torch.float32, quantize=quantize) for quantize in (False, True))

    assert sum(each.nbytes for each in quantized.parameters()) < 0.6 * sum(each.nbytes for each in full.parameters())
    assert [full_shape(each) for each in quantized.parameters()] == [each.shape for each in full.parameters()]
    for model in (full, quantized):
        model.requires_grad_(requires_grad=False)
    assert list(describe_weights(quantized, None)) == list(describe_weights(full, None))
    assert estimate_flops(quantized, has_reference=False) == estimate_flops(full, has_reference=False)


def test_an_image_without_bitsandbytes_is_an_error_of_the_spec(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)

    with pytest.raises(InvalidSpec, match=r"spec\.lora\.quantization: this image has no bitsandbytes"):
        nf4_config(torch.float32, None)


def test_an_evaluation_does_not_change_quantized_weights(text_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even on a CPU with AVX512-BF16, for which bitsandbytes would repack them."""
    monkeypatch.setattr(bitsandbytes.nn.modules, "has_avx512bf16", lambda: True)
    model = load_weights(describe(text_model), torch.float32, quantize=True)
    original = [each.clone() for each in model.parameters()]

    model.eval()
    with torch.no_grad():
        model(input_ids=torch.arange(8).view(1, -1))

    assert all(torch.equal(weight, before) for weight, before in zip(model.parameters(), original, strict=True))
