"""Compares rendered rows with transformers, and their target tokens with the training templates of TRL."""

import copy
import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from finetune_trainer.chat_template.rendered_fields import OMITTED_REASONING
from finetune_trainer.errors import ChatTemplateError
from testing.builders.conversations import WEATHER_TOOL, Message, assistant, tool_result, user, weather_call
from testing.models.renderers import decode_targets
from testing.models.tool_templates import GPT_OSS, LLAMA_3_1, QWEN_3, QWEN_3_5
from tests.unit.finetune_trainer.chat_template.conftest import TemplateTester

UseTemplate = Callable[[str], TemplateTester]
# TRL packages templates of many families, each with a copy that marks the assistant's text with `generation` tags.
TRL_TEMPLATES = Path(importlib.util.find_spec("trl").origin or "").parent / "chat_templates"  # type: ignore[union-attr]
TRL_TOKENS = [
    "<|eot_id|>",
    "<|eom_id|>",
    "<|eot|>",
    "<|eom|>",
    "<|observation|>",
    "<|system|>",
    "<end_of_turn>",
    "<turn|>",
    "<|tool_call_end|>",
    "<|im_sep|>",
]
TEMPLATES = {
    "Qwen3": QWEN_3,
    "Qwen3.5": QWEN_3_5,
    "Llama 3.1": LLAMA_3_1,
    "gpt-oss": GPT_OSS,
    **{
        name: (TRL_TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")
        for name in ("glm4moe", "gptoss", "llama3_1", "nemotron_3_nano", "qwen3", "qwen3_5_think", "qwen3_8")
    },
}
WITHOUT_REASONING = ("Llama 3.1", "llama3_1")

texts = st.text(st.sampled_from('aé "\\{}\n<>'), min_size=1, max_size=6).map(lambda text: f"x{text}x")
reasoning: st.SearchStrategy[dict[str, str]] = st.one_of(
    st.just({}), texts.map(lambda text: {"reasoning_content": f"why {text}"})
)
calls = st.tuples(
    st.builds(lambda fields, city: assistant(None, tool_calls=[weather_call(city)], **fields), reasoning, texts),
    texts.map(lambda text: tool_result(f"TOOL {text}")),
)
exchanges = st.builds(
    lambda question, steps, answer, fields: [
        user(f"USER {question}"),
        *(message for step in steps for message in step),
        assistant(f"answer {answer}", **fields),
    ],
    texts,
    st.lists(calls, max_size=3),
    texts,
    reasoning,
)
conversations = st.lists(exchanges, min_size=1, max_size=3).map(lambda parts: [m for part in parts for m in part])


def remove_reasoning(messages: list[Message]) -> list[Message]:
    return [{key: value for key, value in message.items() if key != "reasoning_content"} for message in messages]


@pytest.mark.parametrize("name", TEMPLATES)
@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(messages=conversations)
def test_rows_are_rendered_as_by_transformers_and_only_assistant_text_is_a_target(
    use_tool_template: UseTemplate, name: str, messages: list[Message]
) -> None:
    tester = use_tool_template(TEMPLATES[name])
    tester.tokenizer.add_tokens(TRL_TOKENS, special_tokens=True)
    messages = remove_reasoning(messages) if name in WITHOUT_REASONING else messages

    sample = tester.render(*messages, tools=[WEATHER_TOOL])

    expected = tester.tokenizer.apply_chat_template(messages, tools=[WEATHER_TOOL], tokenize=True, return_dict=False)
    appended = [tester.tokenizer.eos_token_id] if name == "glm4moe" else []  # its turns have no end token
    assert list(sample.input_ids) == [*expected, *appended]
    targets = "".join(decode_targets(tester.tokenizer, sample))
    assert "USER" not in targets
    assert "TOOL" not in targets
    for message in messages:
        for call in message.get("tool_calls", ()):
            city = call["function"]["arguments"]["city"]
            assert city.strip() in targets or json.dumps(city, ensure_ascii=False) in targets
        if message["role"] == "assistant" and message["content"]:
            assert message["content"].strip() in targets
    assert messages[-1].get("reasoning_content", "").strip() in targets
    omitted = any(m["reasoning_content"].strip() not in targets for m in messages if "reasoning_content" in m)
    assert not omitted or sample.notes == (OMITTED_REASONING,)


TRL_FAMILIES = (
    "gptoss",
    "lfm2_v2",
    "muse_glimmer",
    "nemotron_3_nano",
    "nemotron_3_ultra",
    "qwen2_5",
    "qwen3",
    "qwen3_5_think",
    "qwen3_8",
    "qwen3_instruct_2507",
    "qwen3_vl",
)
# text that TRL trains on and the generation prompt contains, or that is empty reasoning
PROMPTS = ("", "\n", "<|start|>assistant", "<think>", "<think>\n", "<think>\n\n</think>\n\n")
ROWS: dict[str, list[Message]] = {
    "two exchanges": [user("q"), assistant("a"), user("r"), assistant("b")],
    "reasoning": [user("q"), assistant("a", reasoning_content="hm")],
    "two exchanges with reasoning": [
        user("q"),
        assistant("a", reasoning_content="hm"),
        user("r"),
        assistant("b", reasoning_content="ah"),
    ],
    "call": [user("q"), assistant(None, tool_calls=[weather_call()]), tool_result("grey"), assistant("a")],
    "call with content": [user("q"), assistant("I look.", tool_calls=[weather_call()])],
    "calls with reasoning": [
        user("q"),
        assistant("", reasoning_content="one", tool_calls=[weather_call()]),
        tool_result("grey"),
        assistant("", reasoning_content="two", tool_calls=[weather_call("Basel")]),
        tool_result("blue"),
        assistant("a", reasoning_content="three"),
    ],
}


def render_pair(tester: TemplateTester, family: str, row: str) -> list[tuple[str, list[str]]] | None:
    """Return text and targets of a row, with the template of a family and with its copy for training.

    Returns None if the template does not support the row.
    """
    pair = []
    for name in (family, f"{family}_training"):
        tokenizer = copy.deepcopy(tester.tokenizer)
        tokenizer.chat_template = (TRL_TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")
        columns: dict[str, Any] = {"tools": [WEATHER_TOOL]} if "call" in row else {}
        try:
            sample = TemplateTester(tokenizer).render(*ROWS[row], **columns)
        except ChatTemplateError:
            return None
        pair.append((tokenizer.decode(sample.input_ids), decode_targets(tokenizer, sample)))
    return pair


def test_targets_are_those_of_the_training_templates_of_trl(use_tool_template: UseTemplate) -> None:
    tester = use_tool_template("")
    tester.tokenizer.add_tokens(TRL_TOKENS, special_tokens=True)
    compared = set()
    for family in TRL_FAMILIES:
        for row in ROWS:
            pair = render_pair(tester, family, row)
            if pair is None or pair[0][0] != pair[1][0]:  # some training templates keep all reasoning
                continue
            compared.add((family, row))
            for own, expected in zip(pair[0][1], pair[1][1], strict=True):
                assert expected.strip("\n").endswith(own), (family, row)
                assert expected.rstrip("\n").removesuffix(own) in PROMPTS, (family, row)

    assert len(compared) >= 40
    assert {family for family, _ in compared} == set(TRL_FAMILIES)
