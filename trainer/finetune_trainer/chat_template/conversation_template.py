"""Applies the chat template of a tokenizer to the turns of a conversation, with its tools and template variables."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from jinja2 import Environment, TemplateError
from transformers import PreTrainedTokenizerBase

from finetune_trainer import cpu_limit
from finetune_trainer.data_sources.conversations import Conversation
from finetune_trainer.data_sources.messages import Role, Turn
from finetune_trainer.data_sources.tool_calls import JsonObject, ToolCall
from finetune_trainer.errors import ChatTemplateError, ModelError
from finetune_trainer.vision.placeholders import to_content_parts

_TEMPLATE_ERRORS = (TemplateError, TypeError, ValueError, KeyError, AttributeError)
MOVE_SYSTEM_PROMPT = "move its text to the beginning of the first user turn"


@dataclass(frozen=True)
class ConversationTemplate:
    """Chat template of a model with the tools and the template variables of one conversation."""

    tokenizer: PreTrainedTokenizerBase
    subject: str  # origin of the row and name of the model, for error messages
    tools: tuple[JsonObject, ...]
    kwargs: Mapping[str, Any]
    as_content_parts: bool  # whether the content of a message is a list of parts
    arguments_as_text: bool = False  # whether the arguments of tool calls are JSON text, as templates of DeepSeek need

    @classmethod
    def build(
        cls,
        tokenizer: PreTrainedTokenizerBase,
        conversation: Conversation,
        *,
        model_name: str,
        kwargs: Mapping[str, Any],
        as_content_parts: bool,
    ) -> "ConversationTemplate":
        """Build the template of a conversation, whose own template variables override `kwargs`."""
        subject = f'{conversation.origin}: the chat template of model "{model_name}"'
        merged = {**kwargs, **conversation.template_kwargs}
        return cls(tokenizer, subject, conversation.tools, merged, as_content_parts)

    def render(self, turns: Sequence[Turn], **options: Any) -> Any:
        """Render the turns. Raises: ChatTemplateError with the origin of the row, or ModelError if it is too slow."""
        try:
            return self._apply(turns, **options)
        except _TEMPLATE_ERRORS as error:
            if self._rejects_system_prompt(turns):
                raise ChatTemplateError(
                    f"{self.subject} does not support a system prompt ({error}); {MOVE_SYSTEM_PROMPT}"
                ) from error
            raise ChatTemplateError(f"{self.subject} rejects this row: {error}") from error

    def without_tools(self) -> "ConversationTemplate":
        """Return the template without the tools of the conversation."""
        return replace(self, tools=())

    def _apply(self, turns: Sequence[Turn], **options: Any) -> Any:
        messages = [self._build_message(turn) for turn in turns]
        seconds = cpu_limit.TEMPLATE_SECONDS
        too_slow = ModelError(f"{self.subject} needs more than {seconds} s for this row; correct its loops")
        with cpu_limit.limit_cpu_seconds(seconds, too_slow):
            return self.tokenizer.apply_chat_template(
                messages, tools=list(self.tools) or None, **{**self.kwargs, "tokenize": False, **options}
            )

    def _build_message(self, turn: Turn) -> dict[str, Any]:
        """Convert the turn to a message of the format that transformers documents for chat templates.

        transformers copies `reasoning_content` to the other names under which templates read it.
        """
        content: Any = to_content_parts(turn) if self.as_content_parts else turn.content
        optional = {
            "reasoning_content": turn.reasoning,
            "tool_calls": [self._build_tool_call(call) for call in turn.tool_calls],
            "tool_call_id": turn.tool_call_id,
            "name": turn.name,
        }
        return {
            "role": turn.role.value,
            "content": "" if turn.tool_calls and not turn.content else content,
            **{key: value for key, value in optional.items() if value},
        }

    def _build_tool_call(self, call: ToolCall) -> dict[str, Any]:
        arguments = call.arguments_text if self.arguments_as_text else call.arguments
        call_id = {} if call.call_id is None else {"id": call.call_id}
        return {**call_id, "type": "function", "function": {"name": call.name, "arguments": arguments}}

    def _rejects_system_prompt(self, turns: Sequence[Turn]) -> bool:
        """Return whether the system prompt is the reason why the template rejected the turns."""
        others = [turn for turn in turns if turn.role is not Role.SYSTEM]
        if len(others) == len(turns):
            return False
        try:
            self._apply(others)
        except _TEMPLATE_ERRORS:
            return False
        return True


@lru_cache(maxsize=8)
def list_template_names(template: str) -> frozenset[str]:
    """Return the names of all variables and attributes in a Jinja template."""
    return frozenset(value for _, kind, value in Environment().lex(template) if kind == "name")  # noqa: S701


def to_json_text(text: str) -> str:
    """Return the text as it occurs inside a JSON string, as some templates render the results of tools."""
    return json.dumps(text, ensure_ascii=False)[1:-1]
