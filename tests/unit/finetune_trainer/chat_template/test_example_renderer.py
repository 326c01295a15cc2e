"""Tests the target tokens and loss weights of rendered examples, and the errors for unsuitable chat templates."""

import pytest
from transformers import PreTrainedTokenizerFast

from finetune_trainer.chat_template.samples import SPANNING_TOKEN
from finetune_trainer.data_sources.conversations import Conversation, PromptCompletion
from finetune_trainer.data_sources.messages import Role, Turn
from finetune_trainer.errors import ChatTemplateError, ModelError
from testing.models import tiny_text
from testing.models.renderers import decode_targets, use_template

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
# Like templates of reasoning models, this template removes the thinking of earlier assistant turns.
WITHOUT_EARLIER_THINKING = (
    "{%- for message in messages -%}{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{%- if message['role'] == 'assistant' and not loop.last -%}{{ message['content'].split('</think>')[-1] }}"
    "{%- else -%}{{ message['content'] | replace('<think>', '<think>\\n') }}{%- endif -%}{{ '<|im_end|>\\n' }}"
    "{%- endfor -%}{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}"
)

# This template repeats the words of earlier turns, so that they cannot be located.
REPEATED_BEFORE_LAST_TURN = (
    "{%- for message in messages -%}{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{{- message['content'] if loop.last else message['content'] | replace('yes', 'yes yes') }}{{ '<|im_end|>\\n' }}"
    "{%- endfor -%}{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}"
)


def test_a_turn_that_the_template_trims_is_a_target(tokenizer: PreTrainedTokenizerFast) -> None:
    example = Conversation(ORIGIN, (Turn(Role.USER, "q"), Turn(Role.ASSISTANT, "  answer \n")))

    with use_template(tokenizer, LLAMA_3) as renderer:
        assert decode_targets(tokenizer, renderer.render(example)) == ["answer<|im_end|>"]


def test_a_user_turn_that_repeats_the_assistant_turn_is_not_a_target(tokenizer: PreTrainedTokenizerFast) -> None:
    example = Conversation(ORIGIN, (Turn(Role.USER, "echo"), Turn(Role.ASSISTANT, "echo")))

    with use_template(tokenizer, tiny_text.CHAT_TEMPLATE) as renderer:
        assert decode_targets(tokenizer, renderer.render(example)) == ["echo<|im_end|>"]


def test_a_last_turn_that_the_template_rewrites_is_located_by_its_prefix(tokenizer: PreTrainedTokenizerFast) -> None:
    example = Conversation(ORIGIN, (Turn(Role.USER, "q"), Turn(Role.ASSISTANT, "<think>hm</think>yes")))

    with use_template(tokenizer, WITHOUT_EARLIER_THINKING) as renderer:
        assert decode_targets(tokenizer, renderer.render(example)) == ["<think>\nhm</think>yes<|im_end|>"]


def test_an_earlier_turn_is_trained_without_the_thinking_that_the_template_removes(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    thinking_turn = Turn(Role.ASSISTANT, "<think>hm</think>yes")
    example = Conversation(ORIGIN, (Turn(Role.USER, "q"), thinking_turn, Turn(Role.USER, "sure?"), thinking_turn))

    with use_template(tokenizer, WITHOUT_EARLIER_THINKING) as renderer:
        sample = renderer.render(example)

    assert decode_targets(tokenizer, sample) == ["yes<|im_end|>", "<think>\nhm</think>yes<|im_end|>"]


def test_a_template_that_rewrites_earlier_turns_is_rejected(tokenizer: PreTrainedTokenizerFast) -> None:
    turns = (Turn(Role.USER, "q"), Turn(Role.ASSISTANT, "yes"), Turn(Role.USER, "sure?"), Turn(Role.ASSISTANT, "no"))

    with use_template(tokenizer, REPEATED_BEFORE_LAST_TURN) as renderer, pytest.raises(ChatTemplateError) as raised:
        renderer.render(Conversation(ORIGIN, turns))

    assert str(raised.value).startswith(f'{ORIGIN}: the chat template of model "tiny" rewrites turn 1')


def test_the_error_for_a_failing_template_contains_origin_and_message(tokenizer: PreTrainedTokenizerFast) -> None:
    template = "{{ raise_exception('roles must alternate') }}"

    with (
        use_template(tokenizer, template) as renderer,
        pytest.raises(ChatTemplateError, match=r"line 1: .*roles must alternate"),
    ):
        renderer.render(TWO_EXCHANGES)


def test_the_error_for_a_missing_template_suggests_alternatives(tokenizer: PreTrainedTokenizerFast) -> None:
    with use_template(tokenizer, None) as renderer, pytest.raises(ChatTemplateError) as raised:
        renderer.render(TWO_EXCHANGES)

    assert "has no chat template" in str(raised.value)
    assert "instruct variant" in str(raised.value)


def test_a_plain_text_completion_needs_no_template_and_ends_with_an_eos_token(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    with use_template(tokenizer, None) as renderer:
        sample = renderer.render(PromptCompletion(ORIGIN, "A list is", " a mutable sequence."))

    assert decode_targets(tokenizer, sample) == [" a mutable sequence.<|im_end|>"]
    assert tokenizer.decode(sample.input_ids) == "A list is a mutable sequence.<|im_end|>"


@pytest.mark.parametrize(
    "text", ["A list is a mutable sequence.", "Sizes: 1024 and 4096", "caf\u00e9 \u65e5\u672c\u8a9e \U0001f600!"]
)
def test_every_token_of_plain_text_with_a_character_of_the_completion_is_a_target(
    tokenizer: PreTrainedTokenizerFast, text: str
) -> None:
    ranges = tokenizer(text, return_offsets_mapping=True)["offset_mapping"]
    with use_template(tokenizer, None) as renderer:
        for border in range(1, len(text)):
            sample = renderer.render(PromptCompletion(ORIGIN, text[:border], text[border:]))

            expected = [any(character >= border for character in range(*each)) for each in ranges]
            assert list(sample.weights) == [0.0, *map(float, expected[1:]), 1.0], text[:border]
            assert sample.notes == (
                (SPANNING_TOKEN,) if any(a < border < b and text[a:border].strip() for a, b in ranges) else ()
            )


def test_the_first_token_is_never_a_target(tokenizer: PreTrainedTokenizerFast) -> None:
    with use_template(tokenizer, None) as renderer:
        sample = renderer.render(PromptCompletion(ORIGIN, "", "everything is completion"))

    assert sample.weights[0] == 0.0
    assert all(sample.weights[1:])


@pytest.mark.parametrize(
    "loop",
    [
        pytest.param("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", id="always"),
        pytest.param(
            "{% if messages[0].role == 'system' %}{{ raise_exception('no system prompt') }}{% endif %}"
            "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
            id="without the system prompt",
        ),
    ],
)
def test_a_template_that_does_not_end_is_named(
    tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch, loop: str
) -> None:
    monkeypatch.setattr("finetune_trainer.cpu_limit.TEMPLATE_SECONDS", 0.5)

    with (
        pytest.raises(ModelError, match=r"line 1: the chat template of model .* needs more than 0\.5 s"),
        use_template(tokenizer, loop + tiny_text.CHAT_TEMPLATE) as renderer,
    ):
        renderer.render(TWO_EXCHANGES)
