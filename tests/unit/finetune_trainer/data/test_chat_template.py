from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from transformers import PreTrainedTokenizerFast

from finetune_trainer.data.chat_template import Renderer, Sample
from finetune_trainer.data_sources.conversations import Completion, Conversation, Role, Turn
from finetune_trainer.data_sources.readers import Row
from finetune_trainer.errors import ChatTemplateError
from finetune_trainer.methods.sft import render_sample
from testing.models import tiny_text as tiny

PLACE = "/data/train.jsonl line 1"
TWO_ROUNDS = Conversation(
    PLACE,
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
# As Qwen3 does: an empty thought before the last answer, none before earlier ones.
THINKS_LAST = (
    "{%- for message in messages -%}{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{%- if message['role'] == 'assistant' and loop.last and '</think>' not in message['content'] -%}"
    "{{ '<think>\\n\\n</think>\\n\\n' }}{%- endif -%}"
    "{{ message['content'] + '<|im_end|>\\n' }}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}"
)
# As reasoning models do: thoughts of earlier answers are cut away.
FORGETS_THOUGHTS = (
    "{%- for message in messages -%}{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{%- if message['role'] == 'assistant' and not loop.last -%}{{ message['content'].split('</think>')[-1] }}"
    "{%- else -%}{{ message['content'] | replace('<think>', '<think>\\n') }}{%- endif -%}{{ '<|im_end|>\\n' }}"
    "{%- endfor -%}{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}"
)
MARKED = (
    "{%- for message in messages -%}{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{%- if message['role'] == 'assistant' -%}{% generation %}{{ message['content'] + '<|im_end|>' }}"
    "{% endgeneration %}{%- else -%}{{ message['content'] + '<|im_end|>' }}{%- endif -%}{{ '\\n' }}{%- endfor -%}"
)


@contextmanager
def template(tokenizer: PreTrainedTokenizerFast, text: str | None) -> Iterator[Renderer]:
    before = tokenizer.chat_template
    tokenizer.chat_template = text
    try:
        yield Renderer(tokenizer, model_name="tiny")
    finally:
        tokenizer.chat_template = before


def learned(tokenizer: PreTrainedTokenizerFast, sample: Sample) -> list[str]:
    """The stretches of text whose tokens are learned."""
    stretches: list[list[int]] = []
    before = 0.0
    for token, target in zip(sample.tokens, sample.weights, strict=True):
        if target and not before:
            stretches.append([])
        if target:
            stretches[-1].append(token)
        before = target
    return [tokenizer.decode(stretch) for stretch in stretches]


@pytest.mark.parametrize(
    "text",
    [
        pytest.param(tiny.CHAT_TEMPLATE, id="ChatML"),
        pytest.param(LLAMA_3, id="Llama 3"),
        pytest.param(THINKS_LAST, id="Qwen 3"),
        pytest.param(MARKED, id="with generation marks"),
    ],
)
def test_only_the_assistants_words_and_their_end_are_learned(tokenizer: PreTrainedTokenizerFast, text: str) -> None:
    with template(tokenizer, text) as renderer:
        sample = renderer.render(TWO_ROUNDS)

    assert learned(tokenizer, sample) == ["A mutable sequence.<|im_end|>", "An immutable one.<|im_end|>"]


def test_a_blank_that_belongs_to_the_template_may_share_a_token_with_the_answer(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    with template(tokenizer, MISTRAL) as renderer:
        sample = renderer.render(TWO_ROUNDS)

    assert [text.strip() for text in learned(tokenizer, sample)] == [
        "A mutable sequence.<|im_end|>",
        "An immutable one.<|im_end|>",
    ]


def test_the_tokens_are_those_of_the_rendered_conversation(tokenizer: PreTrainedTokenizerFast) -> None:
    messages = [{"role": turn.role.value, "content": turn.content} for turn in TWO_ROUNDS.turns]

    with template(tokenizer, tiny.CHAT_TEMPLATE) as renderer:
        sample = renderer.render(TWO_ROUNDS)

    assert tokenizer.decode(sample.tokens) == tokenizer.apply_chat_template(messages, tokenize=False)


def test_an_answer_that_the_template_trims_is_found(tokenizer: PreTrainedTokenizerFast) -> None:
    example = Conversation(PLACE, (Turn(Role.USER, "q"), Turn(Role.ASSISTANT, "  answer \n")))

    with template(tokenizer, LLAMA_3) as renderer:
        assert learned(tokenizer, renderer.render(example)) == ["answer<|im_end|>"]


def test_an_answer_that_repeats_the_question_is_learned_once(tokenizer: PreTrainedTokenizerFast) -> None:
    example = Conversation(PLACE, (Turn(Role.USER, "echo"), Turn(Role.ASSISTANT, "echo")))

    with template(tokenizer, tiny.CHAT_TEMPLATE) as renderer:
        assert learned(tokenizer, renderer.render(example)) == ["echo<|im_end|>"]


def test_a_rewritten_last_answer_is_found_by_its_prompt(tokenizer: PreTrainedTokenizerFast) -> None:
    example = Conversation(PLACE, (Turn(Role.USER, "q"), Turn(Role.ASSISTANT, "<think>hm</think>yes")))

    with template(tokenizer, FORGETS_THOUGHTS) as renderer:
        assert learned(tokenizer, renderer.render(example)) == ["<think>\nhm</think>yes<|im_end|>"]


def test_an_answer_that_changes_when_the_talk_goes_on_is_refused(tokenizer: PreTrainedTokenizerFast) -> None:
    thoughtful = Turn(Role.ASSISTANT, "<think>hm</think>yes")
    example = Conversation(PLACE, (Turn(Role.USER, "q"), thoughtful, Turn(Role.USER, "sure?"), thoughtful))

    with template(tokenizer, FORGETS_THOUGHTS) as renderer, pytest.raises(ChatTemplateError) as raised:
        renderer.render(example)

    assert str(raised.value).startswith(f'{PLACE}: the chat template of model "tiny" rewrites turn 1')


def test_what_the_template_says_about_a_row_is_passed_on(tokenizer: PreTrainedTokenizerFast) -> None:
    text = "{{ raise_exception('roles must alternate') }}"

    with (
        template(tokenizer, text) as renderer,
        pytest.raises(ChatTemplateError, match=r"line 1: .*roles must alternate"),
    ):
        renderer.render(TWO_ROUNDS)


def test_a_conversation_without_a_template_is_refused_with_the_ways_out(tokenizer: PreTrainedTokenizerFast) -> None:
    with template(tokenizer, None) as renderer, pytest.raises(ChatTemplateError) as raised:
        renderer.render(TWO_ROUNDS)

    assert "has no chat template" in str(raised.value)
    assert "instruct variant" in str(raised.value)


def test_a_completion_needs_no_template_and_ends_with_the_end_token(tokenizer: PreTrainedTokenizerFast) -> None:
    with template(tokenizer, None) as renderer:
        sample = renderer.render(Completion(PLACE, "A list is", " a mutable sequence."))

    assert learned(tokenizer, sample) == [" a mutable sequence.<|im_end|>"]
    assert tokenizer.decode(sample.tokens) == "A list is a mutable sequence.<|im_end|>"


def test_the_first_token_is_never_learned(tokenizer: PreTrainedTokenizerFast) -> None:
    with template(tokenizer, None) as renderer:
        sample = renderer.render(Completion(PLACE, "", "everything is answer"))

    assert sample.weights[0] == 0.0
    assert all(sample.weights[1:])


@pytest.mark.parametrize(
    ("loss_on", "words"),
    [
        pytest.param("assistant", ["A mutable sequence.<|im_end|>", "An immutable one.<|im_end|>"], id="assistant"),
        pytest.param("lastTurn", ["An immutable one.<|im_end|>"], id="last turn"),
    ],
)
@pytest.mark.parametrize("text", [tiny.CHAT_TEMPLATE, MARKED], ids=["ChatML", "with generation marks"])
def test_the_job_says_which_answers_are_learned(
    tokenizer: PreTrainedTokenizerFast, text: str, loss_on: str, words: list[str]
) -> None:
    with template(tokenizer, text) as renderer:
        (sample,) = render_sample(renderer, row_of(TWO_ROUNDS), loss_on=loss_on)

    assert learned(tokenizer, sample) == words


def test_all_that_was_said_can_be_learned_but_the_first_token_which_nothing_predicts(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    with template(tokenizer, tiny.CHAT_TEMPLATE) as renderer:
        (sample,) = render_sample(renderer, row_of(TWO_ROUNDS), loss_on="all")

    assert list(sample.weights) == [0.0] + [1.0] * (len(sample.tokens) - 1)


@pytest.mark.parametrize("text", [tiny.CHAT_TEMPLATE, MARKED], ids=["ChatML", "with generation marks"])
def test_every_token_of_an_answer_has_its_messages_weight(tokenizer: PreTrainedTokenizerFast, text: str) -> None:
    row = row_of(TWO_ROUNDS, weights={2: 0.25, 4: 0.5})
    with template(tokenizer, text) as renderer:
        (sample,) = render_sample(renderer, row, loss_on="assistant")

    weighed = {
        weight: tokenizer.decode(
            [token for token, its in zip(sample.tokens, sample.weights, strict=True) if its == weight]
        )
        for weight in (0.25, 0.5)
    }
    assert weighed == {0.25: "A mutable sequence.<|im_end|>", 0.5: "An immutable one.<|im_end|>"}
    assert set(sample.weights) == {0.0, 0.25, 0.5}


def row_of(conversation: Conversation, weights: dict[int, float] | None = None) -> Row:
    """As a user writes it."""
    messages = [{"role": turn.role.value, "content": turn.content} for turn in conversation.turns]
    weighted = [{**message, "weight": (weights or {}).get(n)} for n, message in enumerate(messages)]
    return Row(conversation.place, {"messages": weighted if weights else messages})
