"""Runs the code with which the model card loads a result, on tiny models."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoModelForMultimodalLM, PreTrainedTokenizerFast

from finetune_trainer.model_card.usage_code import LoadableResult, write_usage_code
from testing.models import tiny_text, tiny_vision

LLAVA_PROCESSOR = {
    "processor_class": "LlavaProcessor",
    "patch_size": 14,
    "vision_feature_select_strategy": "default",
    "image_token": "<image>",
    "num_additional_image_tokens": 1,
}


def run_code(code: str) -> dict[str, Any]:
    variables: dict[str, Any] = {}
    exec(compile(code, "README.md", "exec"), variables)  # noqa: S102
    return variables


def build_result(base: Path, folder: Path, *, auto_class: Any, is_adapter: bool) -> LoadableResult:
    """Save the model of the folder `base` as a result, without training."""
    model = auto_class.from_pretrained(base)
    if is_adapter:
        model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"]))
    model.save_pretrained(folder)
    return LoadableResult(
        auto_class=auto_class.__name__,
        base_model=str(base),
        base_revision=None,
        is_adapter=is_adapter,
        has_vision=auto_class is AutoModelForMultimodalLM,
        location=str(folder),
    )


@pytest.mark.parametrize("is_adapter", [True, False], ids=["adapter", "full model"])
def test_the_code_for_a_text_model_generates_text(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, capsys: pytest.CaptureFixture[str], is_adapter: bool
) -> None:
    base, folder = tmp_path / "base", tmp_path / "result"
    tiny_text.build_model(len(tokenizer)).save_pretrained(base)
    result = build_result(base, folder, auto_class=AutoModelForCausalLM, is_adapter=is_adapter)
    tokenizer.save_pretrained(folder)

    variables = run_code(write_usage_code(result))

    assert hasattr(variables["model"], "peft_config") is is_adapter
    assert variables["output"].shape[1] > variables["inputs"]["input_ids"].shape[1]
    assert capsys.readouterr().out.strip()


@pytest.mark.parametrize("is_adapter", [True, False], ids=["adapter", "full model"])
def test_the_code_for_a_vision_language_model_reads_an_image(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_adapter: bool
) -> None:
    base, folder = tiny_vision.build(tmp_path / "base", "llava"), tmp_path / "result"
    (base / "processor_config.json").write_text(json.dumps(LLAVA_PROCESSOR))
    result = build_result(base, folder, auto_class=AutoModelForMultimodalLM, is_adapter=is_adapter)
    for name in ("processor_config.json", "preprocessor_config.json", "tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((base / name).read_bytes())
    (folder / "chat_template.jinja").write_bytes((base / "chat_template.jinja").read_bytes())
    tiny_vision.write_image(tmp_path, "image.png", (56, 56), seed=0)
    monkeypatch.chdir(tmp_path)

    variables = run_code(write_usage_code(result))

    assert isinstance(variables["inputs"]["pixel_values"], torch.Tensor)
    assert variables["output"].shape[1] > variables["inputs"]["input_ids"].shape[1]


def test_names_are_string_literals_of_python() -> None:
    text = "a\"b\\c\nd\u2028'''${e}"
    result = LoadableResult("AutoModelForCausalLM", text, text, is_adapter=True, has_vision=False, location=text)

    code = write_usage_code(result).splitlines()

    (line,) = (line for line in code if line.startswith("result = "))
    variables = run_code(line)
    assert variables["result"] == text
    assert sum(line.startswith("base = ") and "revision=" in line for line in code) == 1
