"""Write the Python code with which a result is loaded; a test runs it."""

import json
from collections.abc import Iterator
from dataclasses import dataclass

_GENERATE = """\
inputs = {tokenizer}.apply_chat_template(
    messages, add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"
).to(model.device)
output = model.generate(**inputs, max_new_tokens=100)
print({tokenizer}.decode(output[0, inputs["input_ids"].shape[1]:], skip_special_tokens=True))
"""
_TEXT_MESSAGES = 'messages = [{"role": "user", "content": "What can you do?"}]\n'
_IMAGE_MESSAGES = """\
messages = [
    {
        "role": "user",
        "content": [{"type": "image", "path": "image.png"}, {"type": "text", "text": "What does the image show?"}],
    }
]
"""


@dataclass(frozen=True)
class LoadableResult:
    """What determines how a result is loaded."""

    auto_class: str  # class of transformers that loads the model
    base_model: str
    base_revision: str | None
    is_adapter: bool
    has_vision: bool
    location: str  # repository of the result, or its folder


def write_usage_code(result: LoadableResult) -> str:
    """Return Python code that loads the result and generates a completion."""
    tokenizer = "processor" if result.has_vision else "tokenizer"
    auto_tokenizer = "AutoProcessor" if result.has_vision else "AutoTokenizer"
    # An adapter has no config.json, from which AutoProcessor could be loaded.
    needs_base_processor = result.is_adapter and result.has_vision
    processor_source = f"{_quote(result.base_model)}{_format_revision(result)}" if needs_base_processor else "result"
    lines = [
        *(["from peft import PeftModel"] if result.is_adapter else []),
        f"from transformers import {result.auto_class}, {auto_tokenizer}",
        "",
        f"result = {_quote(result.location)}" + ("  # the folder with this file" if result.location == "." else ""),
        *_load_model(result),
        f"{tokenizer} = {auto_tokenizer}.from_pretrained({processor_source})",
        "",
        _IMAGE_MESSAGES if result.has_vision else _TEXT_MESSAGES,
    ]
    return "\n".join(lines) + _GENERATE.format(tokenizer=tokenizer)


def _load_model(result: LoadableResult) -> Iterator[str]:
    if not result.is_adapter:
        yield f'model = {result.auto_class}.from_pretrained(result, dtype="auto")'
        return
    base = f"{_quote(result.base_model)}{_format_revision(result)}"
    yield f'base = {result.auto_class}.from_pretrained({base}, dtype="auto")'
    yield "model = PeftModel.from_pretrained(base, result)"


def _format_revision(result: LoadableResult) -> str:
    return f", revision={_quote(result.base_revision)}" if result.base_revision else ""


def _quote(text: str) -> str:
    """Return a string literal of Python on one line; JSON strings without surrogates are a subset."""
    return json.dumps(text)
