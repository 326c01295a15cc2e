"""Weights in 4 bits: which, and what is said where they cannot be."""

import importlib.util
from pathlib import Path

import bitsandbytes
import pytest
import torch
from bitsandbytes.nn.modules import Linear4bit

from finetune_api.v1alpha1.model_source import ModelSource
from finetune_trainer.errors import InvalidSpec
from finetune_trainer.metrics.flops import measure_work
from finetune_trainer.model.load import Pretrained, describe_model, load_weights
from finetune_trainer.model.parameter_size import whole_shape
from finetune_trainer.model.quantization import four_bit
from finetune_trainer.startup_log import describe_weights
from finetune_trainer.vision.freeze import group_of
from testing.models import tiny_text as tiny
from testing.models import tiny_vision


def describe(folder: Path) -> Pretrained:
    return describe_model(ModelSource(name=str(folder)), torch.device("cpu"))


@pytest.fixture
def text(tmp_path: Path) -> Path:
    return tiny.build(tmp_path, rows=1, eval_rows=1).model


def linear_groups(model: torch.nn.Module, folder: Path) -> dict[bool, set[str]]:
    """Groups of the linear layers, by whether they are in 4 bits."""
    vision = describe(folder).vision
    assert vision is not None
    found: dict[bool, set[str]] = {True: set(), False: set()}
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and not name.endswith("lm_head"):
            found[isinstance(module, Linear4bit)].add(group_of(name, vision.family))
    return found


@pytest.mark.parametrize("kind", tiny_vision.KINDS)
def test_what_sees_keeps_its_bits(tmp_path: Path, kind: str) -> None:
    folder = tiny_vision.build(tmp_path / kind, kind)

    found = linear_groups(load_weights(describe(folder), torch.float32, four_bits=True), folder)

    assert found[True] == {"language"}
    assert "language" not in found[False]


def test_weights_in_4_bits_count_as_what_they_stand_for(text: Path) -> None:
    pretrained = describe(text)
    whole, packed = (load_weights(pretrained, torch.float32, four_bits=four_bits) for four_bits in (False, True))

    assert sum(each.nbytes for each in packed.parameters()) < 0.6 * sum(each.nbytes for each in whole.parameters())
    assert [whole_shape(each) for each in packed.parameters()] == [each.shape for each in whole.parameters()]
    for model in (whole, packed):
        model.requires_grad_(requires_grad=False)
    assert list(describe_weights(packed, None)) == list(describe_weights(whole, None))
    assert measure_work(packed, has_reference=False) == measure_work(whole, has_reference=False)


def test_an_image_without_bitsandbytes_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)

    with pytest.raises(InvalidSpec, match=r"spec\.lora\.quantization: this image has no bitsandbytes"):
        four_bit(torch.float32, None)


def test_an_evaluation_leaves_weights_in_4_bits_as_they_are(text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also on a CPU that multiplies bfloat16, for which bitsandbytes packs them anew."""
    monkeypatch.setattr(bitsandbytes.nn.modules, "has_avx512bf16", lambda: True)
    model = load_weights(describe(text), torch.float32, four_bits=True)
    before = [each.clone() for each in model.parameters()]

    model.eval()
    with torch.no_grad():
        model(input_ids=torch.arange(8).view(1, -1))

    assert all(torch.equal(now, then) for now, then in zip(model.parameters(), before, strict=True))
