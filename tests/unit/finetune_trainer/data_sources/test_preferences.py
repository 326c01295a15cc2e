"""Tests that all column formats are parsed into the same preference, and the errors for malformed pairs."""

import re
from typing import Any

import pytest

from finetune_trainer.data_sources.conversations import Conversation, PromptCompletion
from finetune_trainer.data_sources.messages import Role, Turn
from finetune_trainer.data_sources.preferences import Preference, parse_preference
from finetune_trainer.data_sources.readers import Row
from finetune_trainer.errors import DatasetError
from testing.builders.conversations import WEATHER_TOOL, assistant, weather_call

ORIGIN = "/data/pairs.jsonl line 7"
USER = {"role": "user", "content": "q"}
CHOSEN, REJECTED = {"role": "assistant", "content": "better"}, {"role": "assistant", "content": "worse"}


def parse_columns(columns: dict[str, Any]) -> Preference:
    return parse_preference(Row(ORIGIN, columns))


@pytest.mark.parametrize(
    "columns",
    [
        pytest.param({"chosen": [USER, CHOSEN], "rejected": [USER, REJECTED]}, id="two conversations"),
        pytest.param({"prompt": [USER], "chosen": [CHOSEN], "rejected": [REJECTED]}, id="prompt as messages"),
        pytest.param(
            {"prompt": "q", "chosen": [CHOSEN], "rejected": [REJECTED]}, id="prompt as text, completions as messages"
        ),
        pytest.param(
            {"prompt": "q", "chosen": [USER, CHOSEN], "rejected": [USER, REJECTED]},
            id="prompt repeated in the conversations",
        ),
        pytest.param({"messages": [USER, CHOSEN], "rejected_response": "worse"}, id="rejected last turn"),
        pytest.param({"messages": [USER, CHOSEN], "rejected_messages": [USER, REJECTED]}, id="rejected conversation"),
        pytest.param(
            {
                "conversations": [{"from": "human", "value": "q"}],
                "chosen": {"from": "gpt", "value": "better"},
                "rejected": {"from": "gpt", "value": "worse"},
            },
            id="ShareGPT",
        ),
        pytest.param({"instruction": "q", "chosen": "better", "rejected": "worse"}, id="Alpaca"),
        pytest.param({"query": "q", "chosen": "better", "rejected": "worse"}, id="query with two completions"),
        pytest.param({"query": "q", "response": "better", "rejected_response": "worse"}, id="query and response"),
    ],
)
def test_all_column_formats_are_parsed_into_the_same_preference(columns: dict[str, Any]) -> None:
    prompt = Turn(Role.USER, "q", weight=0.0)

    assert parse_columns(columns) == Preference(
        ORIGIN,
        Conversation(ORIGIN, (prompt, Turn(Role.ASSISTANT, "better"))),
        Conversation(ORIGIN, (prompt, Turn(Role.ASSISTANT, "worse"))),
    )


def test_the_common_prefix_of_both_conversations_is_the_prompt() -> None:
    common_turns = [USER, {"role": "assistant", "content": "a0"}, {"role": "user", "content": "q1"}]

    preference = parse_columns({"chosen": [*common_turns, CHOSEN], "rejected": [*common_turns, REJECTED]})

    for example in (preference.chosen, preference.rejected):
        assert isinstance(example, Conversation)
        assert [turn.weight for turn in example.turns] == [0.0, 0.0, 0.0, 1.0]


def test_text_prompt_and_completions_are_parsed_as_plain_text() -> None:
    preference = parse_columns({"prompt": "1 + 1 =", "chosen": " 2", "rejected": " 3"})

    assert preference == Preference(
        ORIGIN, PromptCompletion(ORIGIN, "1 + 1 =", " 2"), PromptCompletion(ORIGIN, "1 + 1 =", " 3")
    )


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        pytest.param(
            {"prompt": "p", "completion": "c"},
            "dpo needs columns chosen and rejected, or messages and rejected_response; found prompt, completion",
            id="SFT row",
        ),
        pytest.param(
            {"chosen": "a", "rejected": "b"}, "expected a column prompt beside chosen and rejected", id="no prompt"
        ),
        pytest.param(
            {"prompt": "p", "chosen": " ", "rejected": "b"},
            "column chosen: expected a non-empty completion, found none",
            id="empty completion",
        ),
        pytest.param(
            {"messages": [USER, CHOSEN], "rejected_response": " "},
            "rejected: expected a non-empty assistant turn, found none",
            id="empty rejected_response",
        ),
        pytest.param(
            {"messages": [USER], "rejected_response": "b"},
            "column messages: expected an assistant turn at the end, which rejected_response replaces; found a user"
            " turn",
            id="no assistant turn to replace",
        ),
        pytest.param(
            {"chosen": [USER], "rejected": [USER, REJECTED]},
            "chosen: expected a non-empty assistant turn, found none",
            id="conversation without an assistant turn",
        ),
        pytest.param(
            {"instruction": "q", "chosen": 3, "rejected": "b"},
            "column chosen: expected text, found a number (3)",
            id="number instead of text",
        ),
    ],
)
def test_the_error_for_a_malformed_pair_contains_origin_and_expected_value(
    columns: dict[str, Any], message: str
) -> None:
    with pytest.raises(DatasetError, match=f"^{re.escape(ORIGIN)}.*{re.escape(message)}"):
        parse_columns(columns)


def test_both_completions_have_the_tools_of_the_row() -> None:
    preference = parse_columns(
        {
            "messages": [USER, assistant("", tool_calls=[weather_call()])],
            "rejected_messages": [USER, assistant("", tool_calls=[weather_call("Basel")])],
            "tools": [WEATHER_TOOL],
            "chat_template_kwargs": {"enable_thinking": False},
        }
    )

    for conversation, city in ((preference.chosen, "Bern"), (preference.rejected, "Basel")):
        assert isinstance(conversation, Conversation)
        assert conversation.tools == (WEATHER_TOOL,)
        assert conversation.template_kwargs == {"enable_thinking": False}
        assert conversation.turns[0].weight == 0
        assert conversation.turns[1].tool_calls[0].arguments == {"city": city}


def test_tools_beside_plain_text_are_an_error() -> None:
    with pytest.raises(DatasetError, match="column tools: a row of plain text is not rendered with a chat template"):
        parse_columns({"prompt": "q", "chosen": "a", "rejected": "b", "tools": [WEATHER_TOOL]})


@pytest.mark.parametrize("weight", [0.01, 0.5])
def test_a_completion_of_dpo_is_compared_as_a_whole(weight: float) -> None:
    """A message without a loss is possible, because its tokens are left out of both log-probabilities."""
    for accepted in (0, 1, None):
        parse_columns({"prompt": "q", "chosen": [{**CHOSEN, "weight": accepted}], "rejected": [REJECTED]})
    with pytest.raises(DatasetError, match=f"{ORIGIN}, rejected: expected weight 0 or 1, .* found {weight}"):
        parse_columns({"prompt": "q", "chosen": [CHOSEN], "rejected": [{**REJECTED, "weight": weight}]})
