"""Tests which parts of a model are compiled, how often, and the check of the compiler."""

import shutil

import pytest
import torch
from torch._dynamo.utils import counters

from finetune_trainer.errors import InvalidSpec
from finetune_trainer.model.compiled_layers import check_compiler, compile_layers
from finetune_trainer.model.varlen_attention import VARLEN
from finetune_trainer.varlen_inputs import build_varlen_inputs
from finetune_trainer.vision.towers import build_on_meta
from testing.models import attention_families, tiny_vision


def list_compiled_modules(model: torch.nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if module._compiled_call_impl is not None]


@pytest.mark.parametrize("family", attention_families.CONFIGS)
def test_the_parts_of_all_layers_are_compiled(family: str) -> None:
    config = attention_families.CONFIGS[family]()
    model = build_on_meta(config, dtype=torch.float32)

    assert compile_layers(model) == config.num_hidden_layers
    layers = {name.rpartition(".")[0] for name in list_compiled_modules(model)}
    assert layers == {f"model.layers.{index}" for index in range(config.num_hidden_layers)}


@pytest.mark.parametrize("model_type", tiny_vision.RECIPES)
def test_only_the_language_model_of_a_vision_language_model_is_compiled(model_type: str) -> None:
    tokenizer = tiny_vision.build_tokenizer(model_type)
    config = tiny_vision.RECIPES[model_type].build_config(len(tokenizer), tokenizer)
    model = build_on_meta(config, dtype=torch.float32)

    assert compile_layers(model) == config.get_text_config().num_hidden_layers
    assert not any("vision" in name or "visual" in name for name in list_compiled_modules(model))


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "qwen3_moe", "deepseek_v3"])
def test_the_graphs_serve_rows_with_any_number_of_sequences(family: str) -> None:
    """A tuple of lengths in the arguments would be compiled again for each number of sequences."""
    config = attention_families.CONFIGS[family]()
    model = attention_families.build_model(config, attn_implementation=VARLEN)
    expected = [run_row(model, lengths) for lengths in ((5, 7), (6, 9, 3), (20,))]
    torch._dynamo.reset()
    counters.clear()
    compile_layers(model, backend="eager")

    logits = [run_row(model, (5, 7))]
    graphs = counters["stats"]["unique_graphs"]
    logits += [run_row(model, lengths) for lengths in ((6, 9, 3), (20,))]

    assert graphs > 0
    assert counters["stats"]["unique_graphs"] == graphs
    torch.testing.assert_close(logits, expected)


def run_row(model: torch.nn.Module, lengths: tuple[int, ...]) -> torch.Tensor:
    ids = torch.arange(sum(lengths)).unsqueeze(0)
    positions = torch.cat([torch.arange(length) for length in lengths]).unsqueeze(0)
    logits: torch.Tensor = model(
        input_ids=ids, position_ids=positions, use_cache=False, **build_varlen_inputs(lengths)
    ).logits
    return logits


@pytest.mark.parametrize(("device", "compilers"), [("cpu", "g++ or clang++"), ("cuda", "gcc or clang")])
def test_a_missing_compiler_is_named(monkeypatch: pytest.MonkeyPatch, device: str, compilers: str) -> None:
    monkeypatch.setattr(shutil, "which", lambda _: None)

    with pytest.raises(InvalidSpec, match=f"torchCompile: the image contains no {compilers}".replace("+", r"\+")):
        check_compiler(torch.device(device))


def test_one_compiler_suffices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: "/usr/bin/clang" if name == "clang" else None)

    check_compiler(torch.device("cuda"))
