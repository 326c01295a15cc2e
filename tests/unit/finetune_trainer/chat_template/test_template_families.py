"""Tests the target tokens of conversations rendered with the chat templates of well-known model families."""

import copy

import pytest
from transformers import PreTrainedTokenizerFast

from finetune_trainer.chat_template.example_renderer import ExampleRenderer
from finetune_trainer.chat_template.samples import Sample
from finetune_trainer.data_sources.conversations import Conversation
from finetune_trainer.data_sources.messages import Role, Turn
from finetune_trainer.errors import ChatTemplateError
from testing.models.chat_templates import FAMILIES, TemplateFamily

ORIGIN = "/data/train.jsonl line 1"
SYSTEM_TURN = Turn(Role.SYSTEM, "Be brief.")
FIRST_EXCHANGE = (Turn(Role.USER, "What is a list?"), Turn(Role.ASSISTANT, "A mutable sequence."))
SECOND_EXCHANGE = (Turn(Role.USER, "And a tuple?"), Turn(Role.ASSISTANT, "An immutable one."))
CONVERSATIONS = {"one exchange": FIRST_EXCHANGE, "two exchanges": (*FIRST_EXCHANGE, *SECOND_EXCHANGE)}
FAMILIES_WITH_SYSTEM_PROMPT = [name for name, family in FAMILIES.items() if family.supports_system_prompt]


def build_renderer(
    family: TemplateFamily, tokenizer: PreTrainedTokenizerFast
) -> tuple[ExampleRenderer, PreTrainedTokenizerFast]:
    """Return a renderer and its tokenizer, with the special tokens and the chat template of the family."""
    own_tokenizer = copy.deepcopy(tokenizer)
    own_tokenizer.add_tokens(list(family.tokens), special_tokens=True)
    own_tokenizer.bos_token, own_tokenizer.eos_token = family.bos, family.eos
    own_tokenizer.chat_template = family.template
    return ExampleRenderer(own_tokenizer, model_name="tiny"), own_tokenizer


def decode_targets(tokenizer: PreTrainedTokenizerFast, sample: Sample) -> list[str]:
    """Return the text of each contiguous range of target tokens, without surrounding whitespace."""
    mask = "".join("x" if weight else " " for weight in sample.weights)
    texts, start = [], 0
    for run in mask.split():
        start = mask.index(run, start)
        texts.append(tokenizer.decode(sample.input_ids[start : start + len(run)]).strip())
        start += len(run)
    return texts


@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize(
    ("name", "system_turns"),
    [(name, ()) for name in FAMILIES] + [(name, (SYSTEM_TURN,)) for name in FAMILIES_WITH_SYSTEM_PROMPT],
    ids=lambda value: value if isinstance(value, str) else ("with system" if value else "without system"),
)
def test_only_assistant_turns_and_their_end_tokens_are_targets(
    tokenizer: PreTrainedTokenizerFast, name: str, system_turns: tuple[Turn, ...], conversation: str
) -> None:
    family = FAMILIES[name]
    renderer, own_tokenizer = build_renderer(family, tokenizer)

    sample = renderer.render(Conversation(ORIGIN, (*system_turns, *CONVERSATIONS[conversation])))

    assert all(turn.content in own_tokenizer.decode(sample.input_ids) for turn in system_turns)
    *earlier, last = [turn.content for turn in CONVERSATIONS[conversation] if turn.role is Role.ASSISTANT]
    assert decode_targets(own_tokenizer, sample) == [
        *(content + (family.inner_turn_end or family.turn_end) for content in earlier),
        last + family.turn_end,
    ]


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if not family.supports_system_prompt])
def test_the_error_for_an_unsupported_system_prompt_suggests_a_fix(
    tokenizer: PreTrainedTokenizerFast, name: str
) -> None:
    renderer, _ = build_renderer(FAMILIES[name], tokenizer)

    with pytest.raises(ChatTemplateError) as raised:
        renderer.render(Conversation(ORIGIN, (SYSTEM_TURN, *FIRST_EXCHANGE)))

    assert str(raised.value).startswith(f'{ORIGIN}: the chat template of model "tiny" does not support a system prompt')
    assert "move its text to the beginning of the first user turn" in str(raised.value)


def test_other_template_errors_do_not_mention_the_system_prompt(tokenizer: PreTrainedTokenizerFast) -> None:
    renderer, _ = build_renderer(FAMILIES["Gemma 3"], tokenizer)

    with pytest.raises(ChatTemplateError, match=r"rejects this row: .*roles must alternate"):
        renderer.render(Conversation(ORIGIN, (SYSTEM_TURN, FIRST_EXCHANGE[0], *FIRST_EXCHANGE)))


def test_an_appended_end_token_has_the_weight_of_its_turn(tokenizer: PreTrainedTokenizerFast) -> None:
    renderer, own_tokenizer = build_renderer(FAMILIES["GLM-4"], tokenizer)
    user_turn, assistant_turn = FIRST_EXCHANGE

    sample = renderer.render(
        Conversation(ORIGIN, (user_turn, Turn(Role.ASSISTANT, assistant_turn.content, weight=0.5)))
    )

    assert own_tokenizer.decode(sample.input_ids[-1:]) == "<|endoftext|>"
    assert sample.weights[-1] == 0.5


def test_no_end_token_is_appended_after_a_user_turn(tokenizer: PreTrainedTokenizerFast) -> None:
    renderer, own_tokenizer = build_renderer(FAMILIES["GLM-4"], tokenizer)

    sample = renderer.render(Conversation(ORIGIN, (*FIRST_EXCHANGE, SECOND_EXCHANGE[0])))

    assert own_tokenizer.decode(sample.input_ids).endswith("And a tuple?")
    assert decode_targets(own_tokenizer, sample) == ["A mutable sequence.<|user|>"]
