"""Tests that reasoning and tool calls are targets, exactly as templates of well-known families render them."""

from collections.abc import Callable
from typing import Any

import pytest

from finetune_trainer.chat_template.rendered_fields import OMITTED_REASONING
from testing.builders.conversations import WEATHER_TOOL, assistant, tool_result, user, weather_call
from testing.models.tool_templates import DEEPSEEK_V3, GPT_OSS, LLAMA_3_1, QWEN_3, QWEN_3_5
from tests.unit.finetune_trainer.chat_template.conftest import TemplateTester

UseTemplate = Callable[[str], TemplateTester]
REASONING_TURN = assistant("Rain.", reasoning_content="It is\nautumn.")
TOOL_EXCHANGE = (user("Weather?"), assistant(None, tool_calls=[weather_call()]), tool_result('{"sky": "grey"}'))
CALL = '{"city": "Bern"}'


@pytest.mark.parametrize(
    ("template", "target"),
    [
        pytest.param(QWEN_3, "<think>\nIt is\nautumn.\n</think>\n\nRain.<|im_end|>", id="Qwen3"),
        pytest.param(QWEN_3_5, "It is\nautumn.\n</think>\n\nRain.<|im_end|>", id="Qwen3.5"),
        pytest.param(
            GPT_OSS,
            "<|channel|>analysis<|message|>It is\nautumn.<|end|><|start|>assistant<|channel|>final<|message|>Rain."
            "<|return|>",
            id="gpt-oss",
        ),
    ],
)
@pytest.mark.parametrize("key", ["reasoning_content", "thinking", "reasoning"])
def test_the_reasoning_of_the_last_turn_is_a_target(
    use_tool_template: UseTemplate, template: str, target: str, key: str
) -> None:
    turn = assistant("Rain.", **{key: "It is\nautumn."})

    assert use_tool_template(template).render_targets(user("Weather?"), turn) == [target]


@pytest.mark.parametrize(
    ("template", "call_target", "answer_target"),
    [
        pytest.param(
            QWEN_3,
            f'<tool_call>\n{{"name": "get_weather", "arguments": {CALL}}}\n</tool_call><|im_end|>',
            "Grey.<|im_end|>",
            id="Qwen3",
        ),
        pytest.param(
            QWEN_3_5,
            f'\n\n</think>\n\n<tool_call>\n{{"name": "get_weather", "arguments": {CALL}}}\n</tool_call><|im_end|>',
            "\n\n</think>\n\nGrey.<|im_end|>",
            id="Qwen3.5",
        ),
        pytest.param(
            LLAMA_3_1, f'{{"name": "get_weather", "parameters": {CALL}}}<|im_end|>', "Grey.<|im_end|>", id="Llama 3.1"
        ),
        pytest.param(
            GPT_OSS,
            f" to=functions.get_weather<|channel|>commentary json<|message|>{CALL}<|call|>",
            "<|channel|>final<|message|>Grey.<|return|>",
            id="gpt-oss",
        ),
    ],
)
@pytest.mark.parametrize("as_text", [pytest.param(False, id="object"), pytest.param(True, id="JSON text")])
def test_tool_calls_are_targets_and_results_are_not(
    use_tool_template: UseTemplate, template: str, call_target: str, answer_target: str, as_text: bool
) -> None:
    tester = use_tool_template(template)
    messages = (
        user("Weather?"),
        assistant(None, tool_calls=[weather_call(as_text=as_text)]),
        tool_result('{"sky": "grey"}', tool_call_id="1", name="get_weather"),
        assistant("Grey."),
    )

    sample = tester.render(*messages, tools=[WEATHER_TOOL])

    assert tester.render_targets(*messages, tools=[WEATHER_TOOL]) == [call_target, answer_target]
    assert "get_weather" in tester.tokenizer.decode(sample.input_ids).partition("Weather?")[0]


def test_arguments_keep_their_json_text_for_templates_that_need_text(use_tool_template: UseTemplate) -> None:
    call = {"function": {"name": "get_weather", "arguments": '{"city":"Bern"}'}}
    messages = (user("Weather?"), assistant("", tool_calls=[call]), tool_result("grey"), assistant("Grey."))

    assert use_tool_template(DEEPSEEK_V3).render_targets(*messages) == [
        '<|call|>get_weather\n{"city":"Bern"}<|end|><|im_end|>',
        "Grey.<|im_end|>",
    ]


def test_the_content_beside_tool_calls_is_a_target(use_tool_template: UseTemplate) -> None:
    turn = assistant("I look.", tool_calls=[weather_call(), weather_call("Basel")])

    (target,) = use_tool_template(QWEN_3).render_targets(user("Weather?"), turn)

    assert target.startswith("I look.\n<tool_call>\n")
    assert target.endswith('{"city": "Basel"}}\n</tool_call><|im_end|>')


@pytest.mark.parametrize(
    ("template", "targets"),
    [
        pytest.param(QWEN_3, ["Sun.<|im_end|>", "<think>\nIt is\nautumn.\n</think>\n\nRain.<|im_end|>"], id="Qwen3"),
        pytest.param(QWEN_3_5, ["Sun.<|im_end|>", "It is\nautumn.\n</think>\n\nRain.<|im_end|>"], id="Qwen3.5"),
        pytest.param(
            GPT_OSS,
            [
                "<|channel|>final<|message|>Sun.<|end|>",
                "<|channel|>analysis<|message|>It is\nautumn.<|end|><|start|>assistant<|channel|>final<|message|>Rain."
                "<|return|>",
            ],
            id="gpt-oss",
        ),
    ],
)
def test_earlier_turns_are_trained_without_reasoning_if_the_template_leaves_it_out(
    use_tool_template: UseTemplate, template: str, targets: list[str]
) -> None:
    tester = use_tool_template(template)
    messages = (user("Now?"), assistant("Sun.", reasoning_content="July."), user("Later?"), REASONING_TURN)

    assert tester.render_targets(*messages) == targets
    assert tester.render(*messages).notes == (OMITTED_REASONING,)


@pytest.mark.parametrize("template", [QWEN_3, QWEN_3_5], ids=["Qwen3", "Qwen3.5"])
def test_reasoning_in_the_content_is_treated_as_reasoning(use_tool_template: UseTemplate, template: str) -> None:
    tester = use_tool_template(template)
    earlier, last = "<think>\nJuly.\n</think>\n\nSun.", "<think>\nIt is\nautumn.\n</think>\n\nRain."
    inline = (user("Now?"), assistant(earlier), user("Later?"), assistant(last))
    separate = (user("Now?"), assistant("Sun.", reasoning="July."), user("Later?"), REASONING_TURN)

    assert tester.render(*inline) == tester.render(*separate)


@pytest.mark.parametrize("template", [QWEN_3, QWEN_3_5], ids=["Qwen3", "Qwen3.5"])
def test_calls_of_an_earlier_exchange_are_located_without_their_reasoning(
    use_tool_template: UseTemplate, template: str
) -> None:
    messages = (
        user("Weather?"),
        assistant("", reasoning_content="Bern first.", tool_calls=[weather_call("Bern")]),
        tool_result("grey"),
        assistant("", reasoning_content="Basel next.", tool_calls=[weather_call("Basel")]),
        tool_result("blue"),
        assistant("Mixed.", reasoning_content="Both known."),
        user("Thanks"),
        assistant("Welcome.", reasoning_content="Polite."),
    )
    start = '<tool_call>\n{"name": "get_weather", "arguments": {"city": '

    targets = use_tool_template(template).render_targets(*messages)

    assert targets[:3] == [
        f'{start}"Bern"}}}}\n</tool_call><|im_end|>',
        f'{start}"Basel"}}}}\n</tool_call><|im_end|>',
        "Mixed.<|im_end|>",
    ]
    assert targets[3].removeprefix("<think>\n") == "Polite.\n</think>\n\nWelcome.<|im_end|>"


def test_reasoning_of_unfinished_calls_is_a_target(use_tool_template: UseTemplate) -> None:
    turn = assistant("", reasoning_content="I look.", tool_calls=[weather_call()])

    assert use_tool_template(GPT_OSS).render_targets(user("Weather?"), turn) == [
        "<|channel|>analysis<|message|>I look.<|end|><|start|>assistant to=functions.get_weather<|channel|>commentary"
        f" json<|message|>{CALL}<|call|>"
    ]


def test_every_token_of_a_tool_call_has_the_weight_of_its_message(use_tool_template: UseTemplate) -> None:
    messages = (*TOOL_EXCHANGE[:1], {**TOOL_EXCHANGE[1], "weight": 0.5}, TOOL_EXCHANGE[2], assistant("Grey.", weight=0))

    sample = use_tool_template(QWEN_3).render(*messages)

    assert set(sample.weights) == {0.0, 0.5}


@pytest.mark.parametrize(
    ("spec_kwargs", "row_kwargs", "effort"),
    [
        pytest.param({}, None, "medium", id="default"),
        pytest.param({"reasoning_effort": "low"}, None, "low", id="spec"),
        pytest.param({"reasoning_effort": "low"}, {"reasoning_effort": "high"}, "high", id="row overrides spec"),
        pytest.param({}, '{"reasoning_effort": "high"}', "high", id="JSON text"),
    ],
)
def test_variables_of_spec_and_row_reach_the_template(
    use_tool_template: UseTemplate, spec_kwargs: dict[str, Any], row_kwargs: object, effort: str
) -> None:
    tester = use_tool_template(GPT_OSS)

    sample = tester.render(user("q"), assistant("a"), template_kwargs=spec_kwargs, chat_template_kwargs=row_kwargs)

    assert f"Reasoning: {effort}" in tester.tokenizer.decode(sample.input_ids)


def test_empty_reasoning_of_the_generation_prompt_is_not_a_target(use_tool_template: UseTemplate) -> None:
    targets = use_tool_template(QWEN_3).render_targets(
        *TOOL_EXCHANGE, assistant("Grey."), chat_template_kwargs={"enable_thinking": False}
    )

    assert targets == [
        f'<tool_call>\n{{"name": "get_weather", "arguments": {CALL}}}\n</tool_call><|im_end|>',
        "Grey.<|im_end|>",
    ]


def test_a_developer_turn_is_rendered(use_tool_template: UseTemplate) -> None:
    tester = use_tool_template(GPT_OSS)

    sample = tester.render({"role": "developer", "content": "Be brief."}, user("q"), assistant("a"))

    assert "<|start|>developer<|message|>Be brief.<|end|>" in tester.tokenizer.decode(sample.input_ids)
