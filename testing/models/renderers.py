"""Helpers for tests of rendered rows: change the chat template and decode target tokens."""

from collections.abc import Iterator
from contextlib import contextmanager

from transformers import PreTrainedTokenizerFast

from finetune_trainer.chat_template.example_renderer import ExampleRenderer
from finetune_trainer.chat_template.samples import Sample

WITH_GENERATION_TAGS = (
    "{%- for message in messages -%}{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{%- if message['role'] == 'assistant' -%}{% generation %}{{ message['content'] + '<|im_end|>' }}"
    "{% endgeneration %}{%- else -%}{{ message['content'] + '<|im_end|>' }}{%- endif -%}{{ '\\n' }}{%- endfor -%}"
)


@contextmanager
def use_template(tokenizer: PreTrainedTokenizerFast, template: str | None) -> Iterator[ExampleRenderer]:
    """Yield a renderer with this chat template, and restore the tokenizer's template afterwards."""
    previous_template = tokenizer.chat_template
    tokenizer.chat_template = template
    try:
        yield ExampleRenderer(tokenizer, model_name="tiny")
    finally:
        tokenizer.chat_template = previous_template


def decode_targets(tokenizer: PreTrainedTokenizerFast, sample: Sample) -> list[str]:
    """Return the text of every contiguous run of target tokens."""
    runs: list[list[int]] = []
    previous_weight = 0.0
    for token, weight in zip(sample.input_ids, sample.weights, strict=True):
        if weight and not previous_weight:
            runs.append([])
        if weight:
            runs[-1].append(token)
        previous_weight = weight
    return [tokenizer.decode(run) for run in runs]
