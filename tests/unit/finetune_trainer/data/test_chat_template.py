"""Tests which tokens of a rendered example are targets, their weights, and the errors of chat templates."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from transformers import PreTrainedTokenizerFast

from finetune_trainer.data.chat_template import ExampleRenderer, Sample
from finetune_trainer.data_sources.conversations import Conversation, PromptCompletion, Role, Turn
from finetune_trainer.data_sources.readers import Row
from finetune_trainer.errors import ChatTemplateError
from finetune_trainer.methods.sft import render_sample
from testing.models import tiny_text

ORIGIN = "/data/train.jsonl line 1"
TWO_EXCHANGES = Conversation(
    ORIGIN,
    (
        Turn(Role.SYSTEM, "Be brief."),
        Turn(Role.USER, "What is a list?"),
        Turn(Role.ASSISTANT, "A mutable sequence."),
        Turn(Role.USER, "And a tuple?"),
        Turn(Role.ASSISTANT, "An immutable one."),
    ),
)
LLAMA_3 = (
    "{%- for message in messages -%}{{ '<|im_start|>' + message['role'] + '\\n\\n' + message['content'] | trim"
    " + '<|im_end|>' }}{%- endfor -%}{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n\\n' }}{%- endif -%}"
)
MISTRAL = (
    "{%- for message in messages -%}{%- if message['role'] == 'assistant' -%}{{ ' ' + message['content'] + '<|im_end|>'"
    " }}{%- else -%}{{ '[INST] ' + message['content'] + ' [/INST]' }}{%- endif -%}{%- endfor -%}"
)
# Like Qwen3: empty thinking tags in the last assistant turn, none in earlier ones.
EMPTY_THINKING_IN_LAST_TURN = (
    "{%- for message in messages -%}{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{%- if message['role'] == 'assistant' and loop.last and '</think>' not in message['content'] -%}"
    "{{ '<think>\\n\\n</think>\\n\\n' }}{%- endif -%}"
    "{{ message['content'] + '<|im_end|>\\n' }}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}"
)
# Like reasoning models: the thinking of earlier assistant turns is removed.
REMOVES_EARLIER_THINKING = (
    "{%- for message in messages -%}{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{%- if message['role'] == 'assistant' and not loop.last -%}{{ message['content'].split('</think>')[-1] }}"
    "{%- else -%}{{ message['content'] | replace('<think>', '<think>\\n') }}{%- endif -%}{{ '<|im_end|>\\n' }}"
    "{%- endfor -%}{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}"
)
WITH_GENERATION_TAGS = (
    "{%- for message in messages -%}{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{%- if message['role'] == 'assistant' -%}{% generation %}{{ message['content'] + '<|im_end|>' }}"
    "{% endgeneration %}{%- else -%}{{ message['content'] + '<|im_end|>' }}{%- endif -%}{{ '\\n' }}{%- endfor -%}"
)


@contextmanager
def use_template(tokenizer: PreTrainedTokenizerFast, template: str | None) -> Iterator[ExampleRenderer]:
    """Yield a renderer whose tokenizer has this chat template."""
    previous = tokenizer.chat_template
    tokenizer.chat_template = template
    try:
        yield ExampleRenderer(tokenizer, model_name="tiny")
    finally:
        tokenizer.chat_template = previous


def decode_targets(tokenizer: PreTrainedTokenizerFast, sample: Sample) -> list[str]:
    """Return the text of every run of target tokens."""
    runs: list[list[int]] = []
    previous_weight = 0.0
    for token, weight in zip(sample.input_ids, sample.weights, strict=True):
        if weight and not previous_weight:
            runs.append([])
        if weight:
            runs[-1].append(token)
        previous_weight = weight
    return [tokenizer.decode(run) for run in runs]


@pytest.mark.parametrize(
    "template",
    [
        pytest.param(tiny_text.CHAT_TEMPLATE, id="ChatML"),
        pytest.param(LLAMA_3, id="Llama 3"),
        pytest.param(EMPTY_THINKING_IN_LAST_TURN, id="Qwen 3"),
        pytest.param(WITH_GENERATION_TAGS, id="with generation tags"),
    ],
)
def test_only_assistant_turns_and_their_end_tokens_are_targets(
    tokenizer: PreTrainedTokenizerFast, template: str
) -> None:
    with use_template(tokenizer, template) as renderer:
        sample = renderer.render(TWO_EXCHANGES)

    assert decode_targets(tokenizer, sample) == ["A mutable sequence.<|im_end|>", "An immutable one.<|im_end|>"]


def test_a_target_token_may_contain_whitespace_of_the_template(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    with use_template(tokenizer, MISTRAL) as renderer:
        sample = renderer.render(TWO_EXCHANGES)

    assert [text.strip() for text in decode_targets(tokenizer, sample)] == [
        "A mutable sequence.<|im_end|>",
        "An immutable one.<|im_end|>",
    ]


def test_the_input_ids_are_those_of_the_rendered_conversation(tokenizer: PreTrainedTokenizerFast) -> None:
    messages = [{"role": turn.role.value, "content": turn.content} for turn in TWO_EXCHANGES.turns]

    with use_template(tokenizer, tiny_text.CHAT_TEMPLATE) as renderer:
        sample = renderer.render(TWO_EXCHANGES)

    assert tokenizer.decode(sample.input_ids) == tokenizer.apply_chat_template(messages, tokenize=False)


def test_targets_include_a_turn_that_the_template_trims(tokenizer: PreTrainedTokenizerFast) -> None:
    example = Conversation(ORIGIN, (Turn(Role.USER, "q"), Turn(Role.ASSISTANT, "  answer \n")))

    with use_template(tokenizer, LLAMA_3) as renderer:
        assert decode_targets(tokenizer, renderer.render(example)) == ["answer<|im_end|>"]


def test_an_assistant_turn_that_repeats_the_user_turn_is_a_target_once(tokenizer: PreTrainedTokenizerFast) -> None:
    example = Conversation(ORIGIN, (Turn(Role.USER, "echo"), Turn(Role.ASSISTANT, "echo")))

    with use_template(tokenizer, tiny_text.CHAT_TEMPLATE) as renderer:
        assert decode_targets(tokenizer, renderer.render(example)) == ["echo<|im_end|>"]


def test_a_rewritten_last_turn_is_located_by_its_prompt(tokenizer: PreTrainedTokenizerFast) -> None:
    example = Conversation(ORIGIN, (Turn(Role.USER, "q"), Turn(Role.ASSISTANT, "<think>hm</think>yes")))

    with use_template(tokenizer, REMOVES_EARLIER_THINKING) as renderer:
        assert decode_targets(tokenizer, renderer.render(example)) == ["<think>\nhm</think>yes<|im_end|>"]


def test_a_turn_that_the_template_rewrites_when_later_turns_follow_is_rejected(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    thinking_turn = Turn(Role.ASSISTANT, "<think>hm</think>yes")
    example = Conversation(ORIGIN, (Turn(Role.USER, "q"), thinking_turn, Turn(Role.USER, "sure?"), thinking_turn))

    with use_template(tokenizer, REMOVES_EARLIER_THINKING) as renderer, pytest.raises(ChatTemplateError) as raised:
        renderer.render(example)

    assert str(raised.value).startswith(f'{ORIGIN}: the chat template of model "tiny" rewrites turn 1')


def test_an_error_of_the_template_includes_row_and_message(tokenizer: PreTrainedTokenizerFast) -> None:
    template = "{{ raise_exception('roles must alternate') }}"

    with (
        use_template(tokenizer, template) as renderer,
        pytest.raises(ChatTemplateError, match=r"line 1: .*roles must alternate"),
    ):
        renderer.render(TWO_EXCHANGES)


def test_a_conversation_without_a_chat_template_is_rejected_with_the_options(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    with use_template(tokenizer, None) as renderer, pytest.raises(ChatTemplateError) as raised:
        renderer.render(TWO_EXCHANGES)

    assert "has no chat template" in str(raised.value)
    assert "instruct variant" in str(raised.value)


def test_a_prompt_completion_needs_no_template_and_ends_with_the_eos_token(tokenizer: PreTrainedTokenizerFast) -> None:
    with use_template(tokenizer, None) as renderer:
        sample = renderer.render(PromptCompletion(ORIGIN, "A list is", " a mutable sequence."))

    assert decode_targets(tokenizer, sample) == [" a mutable sequence.<|im_end|>"]
    assert tokenizer.decode(sample.input_ids) == "A list is a mutable sequence.<|im_end|>"


def test_the_first_token_is_never_a_target(tokenizer: PreTrainedTokenizerFast) -> None:
    with use_template(tokenizer, None) as renderer:
        sample = renderer.render(PromptCompletion(ORIGIN, "", "everything is completion"))

    assert sample.weights[0] == 0.0
    assert all(sample.weights[1:])


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
def test_loss_on_selects_the_assistant_turns_that_are_targets(
    tokenizer: PreTrainedTokenizerFast, template: str, loss_on: str, targets: list[str]
) -> None:
    with use_template(tokenizer, template) as renderer:
        (sample,) = render_sample(renderer, build_row(TWO_EXCHANGES), loss_on=loss_on)

    assert decode_targets(tokenizer, sample) == targets


def test_loss_on_all_makes_every_token_but_the_first_a_target(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    with use_template(tokenizer, tiny_text.CHAT_TEMPLATE) as renderer:
        (sample,) = render_sample(renderer, build_row(TWO_EXCHANGES), loss_on="all")

    assert list(sample.weights) == [0.0] + [1.0] * (len(sample.input_ids) - 1)


@pytest.mark.parametrize(
    "template", [tiny_text.CHAT_TEMPLATE, WITH_GENERATION_TAGS], ids=["ChatML", "with generation tags"]
)
def test_every_token_of_an_assistant_turn_has_the_weight_of_its_message(
    tokenizer: PreTrainedTokenizerFast, template: str
) -> None:
    row = build_row(TWO_EXCHANGES, weights={2: 0.25, 4: 0.5})
    with use_template(tokenizer, template) as renderer:
        (sample,) = render_sample(renderer, row, loss_on="assistant")

    text_by_weight = {
        weight: tokenizer.decode(
            [token for token, each in zip(sample.input_ids, sample.weights, strict=True) if each == weight]
        )
        for weight in (0.25, 0.5)
    }
    assert text_by_weight == {0.25: "A mutable sequence.<|im_end|>", 0.5: "An immutable one.<|im_end|>"}
    assert set(sample.weights) == {0.0, 0.25, 0.5}


def build_row(conversation: Conversation, weights: dict[int, float] | None = None) -> Row:
    """Return the row with messages that a user would write for this conversation."""
    messages = [{"role": turn.role.value, "content": turn.content} for turn in conversation.turns]
    weighted = [{**message, "weight": (weights or {}).get(n)} for n, message in enumerate(messages)]
    return Row(conversation.origin, {"messages": weighted if weights else messages})
