"""Tests the errors for fields of a row that the chat template does not render."""

from collections.abc import Callable

import pytest

from finetune_trainer.errors import ChatTemplateError
from testing.builders.conversations import WEATHER_TOOL, Message, assistant, tool_result, user, weather_call
from testing.models.tiny_text import CHAT_TEMPLATE
from testing.models.tool_templates import DEEPSEEK_V3, GPT_OSS, LLAMA_3_1, QWEN_3
from tests.unit.finetune_trainer.chat_template.conftest import ORIGIN, TemplateTester

UseTemplate = Callable[[str], TemplateTester]
SUBJECT = f'{ORIGIN}: the chat template of model "tiny"'
CALL_TURN = assistant("", tool_calls=[weather_call()])


TWO_CALLS = (user("q"), assistant("", tool_calls=[weather_call("Bern"), weather_call("Basel")]))

# prints arguments as a Python literal, which is not JSON
PYTHON_LITERALS = (
    "{%- for m in messages -%}{{ '<|im_start|>' + m.role + '\n' + m.content }}"
    "{%- for c in m.tool_calls or [] -%}{{ c.function.name }}{{ c.function.arguments }}{%- endfor -%}"
    "{{ '<|im_end|>' }}{%- endfor -%}"
)


@pytest.mark.parametrize(
    ("template", "messages", "error"),
    [
        pytest.param(
            CHAT_TEMPLATE,
            (user("q"), CALL_TURN),
            "leaves out tool_calls[0] (get_weather) of turn 1 (assistant); write the calls into content",
            id="tool calls",
        ),
        pytest.param(
            GPT_OSS,
            TWO_CALLS,
            "leaves out tool_calls[1] (get_weather) of turn 1 (assistant); write the calls into content",
            id="second tool call",
        ),
        pytest.param(
            LLAMA_3_1, TWO_CALLS, "rejects this row: only single tool calls are supported", id="rejected tool call"
        ),
        pytest.param(
            LLAMA_3_1,
            (user("q"), assistant("I look.", tool_calls=[weather_call()])),
            "leaves out or changes the content of turn 1 (assistant) beside its tool_calls; remove it",
            id="content beside tool calls",
        ),
        pytest.param(
            CHAT_TEMPLATE.replace("message['content']", "message['content'] | upper"),
            (user("q"), assistant("a b")),
            "leaves out or changes the content of turn 1 (assistant)",
            id="changed content",
        ),
        pytest.param(
            QWEN_3,
            ({"role": "developer", "content": "Be brief."}, user("q"), assistant("a")),
            "leaves out turn 0 (developer); change the role to system",
            id="developer turn",
        ),
        pytest.param(
            "{%- for m in messages if m.role != 'tool' -%}{{ m.role + m.content + '<|im_end|>' }}"
            "{%- for c in m.tool_calls or [] -%}{{ c.function | tojson }}{%- endfor -%}{%- endfor -%}",
            (user("q"), CALL_TURN, tool_result("grey"), assistant("Grey.")),
            "leaves out turn 2 (tool); change the role to user",
            id="tool turn",
        ),
        pytest.param(
            CHAT_TEMPLATE,
            (user("q"), assistant("a", reasoning_content="hm")),
            "leaves out the reasoning_content of turn 1 (assistant); write it into content in the format",
            id="reasoning",
        ),
        pytest.param(
            CHAT_TEMPLATE,
            (user("q"), assistant("a", reasoning_content="hm"), user("r"), assistant("b")),
            "leaves out the reasoning_content of turn 1 (assistant)",
            id="reasoning of an earlier turn, which the template never renders",
        ),
        pytest.param(
            DEEPSEEK_V3,
            (user("q"), assistant("<think>hm</think>a")),
            "leaves out the text in <think> of turn 1 (assistant)",
            id="reasoning in the content",
        ),
    ],
)
def test_a_field_that_the_template_leaves_out_is_an_error(
    use_tool_template: UseTemplate, template: str, messages: tuple[Message, ...], error: str
) -> None:
    with pytest.raises(ChatTemplateError) as raised:
        use_tool_template(template).render(*messages)

    assert str(raised.value).startswith(f"{SUBJECT} {error}")


def test_tools_that_the_template_leaves_out_are_an_error(use_tool_template: UseTemplate) -> None:
    with pytest.raises(ChatTemplateError) as raised:
        use_tool_template(CHAT_TEMPLATE).render(user("q"), assistant("a"), tools=[WEATHER_TOOL])

    assert str(raised.value).startswith(
        f"{SUBJECT} leaves out the column tools; describe the tools in the system prompt, or remove the column"
    )


def test_a_variable_that_the_template_does_not_read_is_an_error(use_tool_template: UseTemplate) -> None:
    with pytest.raises(ChatTemplateError) as raised:
        use_tool_template(QWEN_3).render(user("q"), assistant("a"), chat_template_kwargs={"enable_thinkng": False})

    assert str(raised.value) == (
        f'{ORIGIN}, column chat_template_kwargs: the chat template of model "tiny" has no variable enable_thinkng;'
        " correct its name, or remove it"
    )


def test_arguments_are_json_text_if_the_template_prints_objects_as_python_literals(
    use_tool_template: UseTemplate,
) -> None:
    (target,) = use_tool_template(PYTHON_LITERALS).render_targets(user("q"), CALL_TURN)

    assert target.endswith('get_weather{"city": "Bern"}<|im_end|>')
