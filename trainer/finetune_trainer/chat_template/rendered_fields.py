"""Checks that the rendered text contains every field of a row, so that no field is omitted silently (decisions/518)."""

from collections.abc import Sequence
from dataclasses import replace

from finetune_trainer.chat_template.anchors import (
    AnchoredTurns,
    AssistantText,
    Probe,
    get_content_anchor,
    get_reasoning_anchor,
)
from finetune_trainer.chat_template.conversation_template import (
    MOVE_SYSTEM_PROMPT,
    ConversationTemplate,
)
from finetune_trainer.data_sources.messages import Role, Turn
from finetune_trainer.errors import ChatTemplateError

OMITTED_REASONING = "the chat template leaves out the reasoning of earlier turns"
_REMEDIES = {
    Role.ASSISTANT: "write the calls into content in the format that the model should learn, one per turn",
    Role.DEVELOPER: "change the role to system",
    Role.TOOL: "change the role to user, and write the call into the content of the assistant turn",
}


def select_argument_format(template: ConversationTemplate, turns: Sequence[Turn]) -> ConversationTemplate:
    """Return the template with the format of arguments, object or text, in which it renders all calls and messages.

    Raises: ChatTemplateError if it renders them in neither format.
    """
    probe = Probe.build(turns)
    if not probe.fields:
        return template
    first_error: ChatTemplateError | None = None
    missing: list[str] = []
    for arguments_as_text in (False, True):
        candidate = replace(template, arguments_as_text=arguments_as_text)
        try:
            field = probe.find_missing(candidate.render(probe.turns))
        except ChatTemplateError as error:
            first_error = first_error or error
            continue
        if field is None:
            return candidate
        missing.append(field)
    if not missing and first_error is not None:
        raise first_error
    role = next(role for role in _REMEDIES if missing[0].endswith(f"({role})"))
    raise ChatTemplateError(f"{template.subject} leaves out {missing[0]}; {_REMEDIES[role]}")


def check_context(template: ConversationTemplate, turns: Sequence[Turn], text: str) -> None:
    """Raise ChatTemplateError if the text contains no system prompt or no tools, although the row has them.

    Some templates render the system prompt only with a generation prompt; training would silently omit it.
    """
    for turn in turns:
        if turn.role is Role.SYSTEM and turn.content.strip() not in text:
            raise ChatTemplateError(
                f"{template.subject} does not support a system prompt (it leaves it out); {MOVE_SYSTEM_PROMPT}"
            )
    if template.tools and template.without_tools().render(turns) == text:
        raise ChatTemplateError(
            f"{template.subject} leaves out the column tools; describe the tools in the system prompt, or remove the"
            " column"
        )


def find_omitted_reasoning(
    template: ConversationTemplate, turns: Sequence[Turn], text: str, anchored_text: str
) -> tuple[int, ...]:
    """Return the earlier assistant turns whose reasoning the template leaves out, as reasoning models require it.

    Raises: ChatTemplateError if it leaves out the reasoning of the last turn, or the content of any turn.
    """
    omitted = []
    for index, turn in enumerate(turns):
        if turn.role is not Role.ASSISTANT:
            continue
        parts = AssistantText.split(turn)
        if parts.content.strip() not in text and get_content_anchor(index) not in anchored_text:
            raise ChatTemplateError(
                f"{template.subject} leaves out or changes the content of turn {index} (assistant)"
                + (" beside its tool_calls; remove it, or write the call into the content" if turn.tool_calls else "")
            )
        if parts.has_reasoning and get_reasoning_anchor(index) not in anchored_text:
            omitted.append(index)
    if omitted and (omitted[-1] == len(turns) - 1 or not _reads_reasoning(template, turns[: omitted[-1] + 1])):
        index = omitted[-1]
        key = "reasoning_content" if turns[index].reasoning else "text in <think>"
        raise ChatTemplateError(
            f"{template.subject} leaves out the {key} of turn {index} (assistant); write it into content in the format"
            " that the model should learn, or remove it"
        )
    return tuple(omitted)


def _reads_reasoning(template: ConversationTemplate, turns: Sequence[Turn]) -> bool:
    """Return whether the template renders the reasoning of the last of the turns if no other turns follow."""
    anchored = AnchoredTurns.build(turns)
    return get_reasoning_anchor(len(turns) - 1) in template.render(anchored.turns)
