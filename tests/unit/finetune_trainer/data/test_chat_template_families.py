"""With the templates of well-known families, labels decode to the assistant's words and their end, nothing else."""

import copy

import pytest
from transformers import PreTrainedTokenizerFast

from finetune_trainer.data.chat_template import Renderer, Sample
from finetune_trainer.data_sources.conversations import Conversation, Role, Turn
from finetune_trainer.errors import ChatTemplateError
from testing.models.chat_templates import FAMILIES, Family

PLACE = "/data/train.jsonl line 1"
SYSTEM = Turn(Role.SYSTEM, "Be brief.")
FIRST = (Turn(Role.USER, "What is a list?"), Turn(Role.ASSISTANT, "A mutable sequence."))
SECOND = (Turn(Role.USER, "And a tuple?"), Turn(Role.ASSISTANT, "An immutable one."))
TALKS = {"one round": FIRST, "two rounds": (*FIRST, *SECOND)}
TAKE_A_SYSTEM_PROMPT = [name for name, family in FAMILIES.items() if family.system]


def renderer_of(family: Family, tokenizer: PreTrainedTokenizerFast) -> tuple[Renderer, PreTrainedTokenizerFast]:
    own = copy.deepcopy(tokenizer)
    own.add_tokens(list(family.tokens), special_tokens=True)
    own.bos_token, own.eos_token, own.chat_template = family.bos, family.eos, family.template
    return Renderer(own, model_name="tiny"), own


def learned(tokenizer: PreTrainedTokenizerFast, sample: Sample) -> list[str]:
    """The stretches that are learned, without the blank that an answer may begin with."""
    marks = "".join("x" if weight else " " for weight in sample.weights)
    stretches, start = [], 0
    for stretch in marks.split():
        start = marks.index(stretch, start)
        stretches.append(tokenizer.decode(sample.tokens[start : start + len(stretch)]).strip())
        start += len(stretch)
    return stretches


@pytest.mark.parametrize("talk", TALKS)
@pytest.mark.parametrize(
    ("name", "system"),
    [(name, ()) for name in FAMILIES] + [(name, (SYSTEM,)) for name in TAKE_A_SYSTEM_PROMPT],
    ids=lambda value: value if isinstance(value, str) else ("with system" if value else "without system"),
)
def test_only_the_assistants_words_and_their_end_are_learned(
    tokenizer: PreTrainedTokenizerFast, name: str, system: tuple[Turn, ...], talk: str
) -> None:
    family = FAMILIES[name]
    renderer, own = renderer_of(family, tokenizer)

    sample = renderer.render(Conversation(PLACE, (*system, *TALKS[talk])))

    *earlier, last = [turn.content for turn in TALKS[talk] if turn.role is Role.ASSISTANT]
    assert learned(own, sample) == [
        *(words + (family.inner_end or family.end) for words in earlier),
        last + family.end,
    ]


@pytest.mark.parametrize("name", TAKE_A_SYSTEM_PROMPT)
def test_the_system_prompt_is_read_and_not_learned(tokenizer: PreTrainedTokenizerFast, name: str) -> None:
    renderer, own = renderer_of(FAMILIES[name], tokenizer)

    sample = renderer.render(Conversation(PLACE, (SYSTEM, *FIRST)))

    assert SYSTEM.content in own.decode(sample.tokens)
    assert SYSTEM.content not in "".join(learned(own, sample))


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if not family.system])
def test_a_system_prompt_that_the_template_does_not_take_is_an_error_that_says_so(
    tokenizer: PreTrainedTokenizerFast, name: str
) -> None:
    renderer, _ = renderer_of(FAMILIES[name], tokenizer)

    with pytest.raises(ChatTemplateError) as raised:
        renderer.render(Conversation(PLACE, (SYSTEM, *FIRST)))

    assert str(raised.value).startswith(f'{PLACE}: the chat template of model "tiny" takes no system prompt')
    assert "put its words at the beginning of the first user turn" in str(raised.value)


def test_a_refusal_for_another_reason_does_not_blame_the_system_prompt(tokenizer: PreTrainedTokenizerFast) -> None:
    renderer, _ = renderer_of(FAMILIES["Gemma 3"], tokenizer)

    with pytest.raises(ChatTemplateError, match=r"refuses this row: .*roles must alternate"):
        renderer.render(Conversation(PLACE, (SYSTEM, FIRST[0], *FIRST)))


def test_an_end_that_the_template_leaves_out_has_the_weight_of_its_answer(tokenizer: PreTrainedTokenizerFast) -> None:
    renderer, own = renderer_of(FAMILIES["GLM-4"], tokenizer)
    question, answer = FIRST

    sample = renderer.render(Conversation(PLACE, (question, Turn(Role.ASSISTANT, answer.content, weight=0.5))))

    assert own.decode(sample.tokens[-1:]) == "<|endoftext|>"
    assert sample.weights[-1] == 0.5


def test_a_conversation_that_ends_with_a_question_gets_no_end(tokenizer: PreTrainedTokenizerFast) -> None:
    renderer, own = renderer_of(FAMILIES["GLM-4"], tokenizer)

    sample = renderer.render(Conversation(PLACE, (*FIRST, SECOND[0])))

    assert own.decode(sample.tokens).endswith("And a tuple?")
    assert learned(own, sample) == ["A mutable sequence.<|user|>"]
