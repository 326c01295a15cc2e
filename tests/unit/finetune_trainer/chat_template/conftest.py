"""Fixture with a renderer of rows for chat templates with tools and reasoning."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from finetune_trainer.chat_template.example_renderer import ExampleRenderer
from finetune_trainer.chat_template.samples import Sample
from finetune_trainer.data_sources.conversations import parse_example
from finetune_trainer.data_sources.readers import Row
from testing.models.renderers import decode_targets
from testing.models.tool_templates import SPECIAL_TOKENS, TAGS

ORIGIN = "/data/train.jsonl line 7"


@dataclass(frozen=True)
class TemplateTester:
    """Renders rows with one chat template."""

    tokenizer: PreTrainedTokenizerFast

    def render(
        self, *messages: dict[str, Any], template_kwargs: dict[str, Any] | None = None, **columns: Any
    ) -> Sample:
        """Render a row with these messages and further columns."""
        renderer = ExampleRenderer(self.tokenizer, model_name="tiny", template_kwargs=template_kwargs)
        return renderer.render(parse_example(Row(ORIGIN, {"messages": list(messages), **columns})))

    def render_targets(self, *messages: dict[str, Any], **columns: Any) -> list[str]:
        """Return the text of every contiguous run of target tokens of a row."""
        return decode_targets(self.tokenizer, self.render(*messages, **columns))


@pytest.fixture
def use_tool_template(tokenizer: PreTrainedTokenizerFast) -> Callable[[str], TemplateTester]:
    """Return a function that returns a tester for a chat template, with all tokens of the templates with tools."""

    def build(template: str) -> TemplateTester:
        own_tokenizer = copy.deepcopy(tokenizer)
        own_tokenizer.add_tokens(list(SPECIAL_TOKENS), special_tokens=True)
        own_tokenizer.add_tokens(list(TAGS))
        own_tokenizer.chat_template = template
        own_tokenizer.model_max_length = 1_000_000
        return TemplateTester(own_tokenizer)

    return build
