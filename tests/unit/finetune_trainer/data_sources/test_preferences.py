from typing import Any

import pytest

from finetune_trainer.data_sources.conversations import Completion, Conversation, Role, Turn
from finetune_trainer.data_sources.preferences import Preference, parse_preference
from finetune_trainer.data_sources.readers import Row
from finetune_trainer.errors import DatasetError

PLACE = "/data/pairs.jsonl line 7"
QUESTION = {"role": "user", "content": "q"}
GOOD, BAD = {"role": "assistant", "content": "good"}, {"role": "assistant", "content": "bad"}


def parse(columns: dict[str, Any]) -> Preference:
    return parse_preference(Row(PLACE, columns))


@pytest.mark.parametrize(
    "columns",
    [
        pytest.param({"chosen": [QUESTION, GOOD], "rejected": [QUESTION, BAD]}, id="two conversations"),
        pytest.param({"prompt": [QUESTION], "chosen": [GOOD], "rejected": [BAD]}, id="a prompt of messages"),
        pytest.param({"prompt": "q", "chosen": [GOOD], "rejected": [BAD]}, id="a prompt of text, answers as messages"),
        pytest.param(
            {"prompt": "q", "chosen": [QUESTION, GOOD], "rejected": [QUESTION, BAD]},
            id="a prompt that the conversations repeat",
        ),
        pytest.param({"messages": [QUESTION, GOOD], "rejected_response": "bad"}, id="another last answer"),
        pytest.param(
            {"messages": [QUESTION, GOOD], "rejected_messages": [QUESTION, BAD]}, id="another whole conversation"
        ),
        pytest.param(
            {
                "conversations": [{"from": "human", "value": "q"}],
                "chosen": {"from": "gpt", "value": "good"},
                "rejected": {"from": "gpt", "value": "bad"},
            },
            id="ShareGPT",
        ),
        pytest.param({"instruction": "q", "chosen": "good", "rejected": "bad"}, id="Alpaca"),
        pytest.param({"query": "q", "chosen": "good", "rejected": "bad"}, id="a query with two answers"),
        pytest.param({"query": "q", "response": "good", "rejected_response": "bad"}, id="query and response"),
    ],
)
def test_the_spellings_of_a_preference_mean_the_same(columns: dict[str, Any]) -> None:
    prompt = Turn(Role.USER, "q", weight=0.0)

    assert parse(columns) == Preference(
        PLACE,
        Conversation(PLACE, (prompt, Turn(Role.ASSISTANT, "good"))),
        Conversation(PLACE, (prompt, Turn(Role.ASSISTANT, "bad"))),
    )


def test_answers_that_both_conversations_share_belong_to_the_prompt() -> None:
    before = [QUESTION, {"role": "assistant", "content": "a0"}, {"role": "user", "content": "q1"}]

    found = parse({"chosen": [*before, GOOD], "rejected": [*before, BAD]})

    for example in (found.chosen, found.rejected):
        assert isinstance(example, Conversation)
        assert [turn.weight for turn in example.turns] == [0.0, 0.0, 0.0, 1.0]


def test_a_prompt_of_text_with_answers_of_text_is_rendered_without_a_template() -> None:
    found = parse({"prompt": "1 + 1 =", "chosen": " 2", "rejected": " 3"})

    assert found == Preference(PLACE, Completion(PLACE, "1 + 1 =", " 2"), Completion(PLACE, "1 + 1 =", " 3"))


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        pytest.param(
            {"prompt": "p", "completion": "c"},
            "dpo needs columns chosen and rejected, or messages and rejected_response; found prompt, completion",
            id="rows of SFT",
        ),
        pytest.param(
            {"chosen": "a", "rejected": "b"}, "expected a column prompt beside chosen and rejected", id="no prompt"
        ),
        pytest.param(
            {"prompt": "p", "chosen": " ", "rejected": "b"},
            "column chosen: expected an answer with words, found none",
            id="an empty answer",
        ),
        pytest.param(
            {"messages": [QUESTION, GOOD], "rejected_response": " "},
            "rejected: expected an answer of the assistant with words, found none",
            id="an empty last answer",
        ),
        pytest.param(
            {"messages": [QUESTION], "rejected_response": "b"},
            "column messages: expected the assistant's answer at the end, which rejected_response replaces; found a"
            " turn of user",
            id="nothing to replace",
        ),
        pytest.param(
            {"chosen": [QUESTION], "rejected": [QUESTION, BAD]},
            "chosen: expected an answer of the assistant with words, found none",
            id="a conversation without an answer",
        ),
        pytest.param(
            {"instruction": "q", "chosen": 3, "rejected": "b"},
            "column chosen: expected text, found a number (3)",
            id="a number",
        ),
    ],
)
def test_a_malformed_pair_is_named_with_what_was_expected(columns: dict[str, Any], message: str) -> None:
    with pytest.raises(DatasetError) as raised:
        parse(columns)

    assert str(raised.value).startswith(PLACE)
    assert message in str(raised.value)
