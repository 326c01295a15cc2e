"""Tests the target tokens of each training method, and the names of the row renderers."""

from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from finetune_trainer.data.row_rendering import render_dpo_row, render_sft_row, select_row_renderer
from finetune_trainer.data_sources.readers import Row
from testing.builders.conversations import WEATHER_TOOL, assistant, tool_result, user, weather_call
from testing.builders.jobs import parse_spec
from testing.models import tiny_text
from testing.models.renderers import WITH_GENERATION_TAGS, decode_targets, use_template
from testing.models.tool_templates import QWEN_3

ORIGIN = "/data/train.jsonl line 1"
MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is a list?"},
    {"role": "assistant", "content": "A mutable sequence."},
    {"role": "user", "content": "And a tuple?"},
    {"role": "assistant", "content": "An immutable one."},
]


@pytest.mark.parametrize(
    ("loss_on", "targets"),
    [
        pytest.param("assistant", ["A mutable sequence.<|im_end|>", "An immutable one.<|im_end|>"], id="assistant"),
        pytest.param("lastTurn", ["An immutable one.<|im_end|>"], id="last turn"),
    ],
)
@pytest.mark.parametrize(
    "template", [tiny_text.CHAT_TEMPLATE, WITH_GENERATION_TAGS], ids=["ChatML", "with generation tags"]
)
def test_loss_on_determines_which_assistant_turns_are_targets(
    tokenizer: PreTrainedTokenizerFast, template: str, loss_on: str, targets: list[str]
) -> None:
    with use_template(tokenizer, template) as renderer:
        (sample,) = render_sft_row(renderer, Row(ORIGIN, {"messages": MESSAGES}), loss_on=loss_on)

    assert decode_targets(tokenizer, sample) == targets


def test_every_token_except_the_first_is_a_target_with_loss_on_all(tokenizer: PreTrainedTokenizerFast) -> None:
    with use_template(tokenizer, tiny_text.CHAT_TEMPLATE) as renderer:
        (sample,) = render_sft_row(renderer, Row(ORIGIN, {"messages": MESSAGES}), loss_on="all")

    assert list(sample.weights) == [0.0] + [1.0] * (len(sample.input_ids) - 1)


@pytest.mark.parametrize(
    "template", [tiny_text.CHAT_TEMPLATE, WITH_GENERATION_TAGS], ids=["ChatML", "with generation tags"]
)
def test_every_token_of_an_assistant_turn_has_the_weight_of_its_message(
    tokenizer: PreTrainedTokenizerFast, template: str
) -> None:
    weights = {2: 0.25, 4: 0.5}
    row = Row(ORIGIN, {"messages": [{**message, "weight": weights.get(n)} for n, message in enumerate(MESSAGES)]})
    with use_template(tokenizer, template) as renderer:
        (sample,) = render_sft_row(renderer, row, loss_on="assistant")

    text_by_weight = {
        weight: tokenizer.decode(
            [
                token
                for token, loss_weight in zip(sample.input_ids, sample.weights, strict=True)
                if loss_weight == weight
            ]
        )
        for weight in (0.25, 0.5)
    }
    assert text_by_weight == {0.25: "A mutable sequence.<|im_end|>", 0.5: "An immutable one.<|im_end|>"}
    assert set(sample.weights) == {0.0, 0.25, 0.5}


def test_only_the_completions_of_a_pair_are_targets(tokenizer: PreTrainedTokenizerFast) -> None:
    row = Row(ORIGIN, {"messages": MESSAGES, "rejected_response": "A list."})

    with use_template(tokenizer, tiny_text.CHAT_TEMPLATE) as renderer:
        chosen, rejected = render_dpo_row(renderer, row)

    assert decode_targets(tokenizer, chosen) == ["An immutable one.<|im_end|>"]
    assert decode_targets(tokenizer, rejected) == ["A list.<|im_end|>"]


def test_only_the_last_tool_call_is_a_target_with_loss_on_the_last_turn(tokenizer: PreTrainedTokenizerFast) -> None:
    messages = [user("q"), assistant("", tool_calls=[weather_call()]), tool_result("grey")]
    last = assistant("", tool_calls=[weather_call("Basel")], reasoning_content="Next.")

    with use_template(tokenizer, QWEN_3) as renderer:
        (sample,) = render_sft_row(renderer, Row(ORIGIN, {"messages": [*messages, last]}), loss_on="lastTurn")

    (target,) = decode_targets(tokenizer, sample)
    assert target.startswith("<think>\nNext.\n</think>\n\n<tool_call>")
    assert '"Basel"' in target


def test_a_pair_of_tool_calls_differs_in_the_completions_only(tokenizer: PreTrainedTokenizerFast) -> None:
    pair = {
        name: [user("q"), assistant("", tool_calls=[weather_call(city)])]
        for name, city in (("chosen", "Bern"), ("rejected", "Basel"))
    }

    with use_template(tokenizer, QWEN_3) as renderer:
        sequences = render_dpo_row(renderer, Row(ORIGIN, {**pair, "tools": [WEATHER_TOOL]}))

    targets = [decode_targets(tokenizer, sample) for sample in sequences]
    assert targets == [
        [f'<tool_call>\n{{"name": "get_weather", "arguments": {{"city": "{city}"}}}}\n</tool_call><|im_end|>']
        for city in ("Bern", "Basel")
    ]


@pytest.mark.parametrize(
    ("method", "name"),
    [
        pytest.param({"sft": {}}, "sft assistant", id="sft"),
        pytest.param({"sft": {"lossOn": "lastTurn"}}, "sft lastTurn", id="sft on the last turn"),
        pytest.param({"sft": None, "dpo": {}}, "dpo", id="dpo"),
    ],
)
def test_the_renderer_name_identifies_method_and_target_tokens(method: dict[str, Any], name: str) -> None:
    """The name of the row renderer is part of the cache key."""
    assert select_row_renderer(parse_spec(**method)).name == name
