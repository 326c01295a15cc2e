"""Anchors: unique texts that replace parts of turns, so that the parts can be located in the rendered text."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from finetune_trainer.chat_template.conversation_template import to_json_text
from finetune_trainer.chat_template.samples import Span
from finetune_trainer.data_sources.messages import Role, Turn
from finetune_trainer.data_sources.tool_calls import ToolCall

_CONTENT_ANCHOR = "⟦content {}⟧"
_REASONING_ANCHOR = "⟦reasoning {}⟧"
_CALL_ANCHOR = "⟦call {}.{}⟧"
_ARGUMENT_ANCHOR = "⟦argument {}.{}⟧"
_INLINE_REASONING = re.compile(r"(\s*<think>\s*)(.*?)(\s*</think>\s*)(.*)", re.DOTALL)


@dataclass(frozen=True)
class AssistantText:
    """Reasoning and content of an assistant turn; the reasoning may be inside `<think>` tags of the content."""

    reasoning: str
    content: str
    tags: tuple[str, str] | None  # the tags around inline reasoning, with the whitespace beside them

    @classmethod
    def split(cls, turn: Turn) -> "AssistantText":
        """Split the text of an assistant turn."""
        match = None if turn.reasoning else _INLINE_REASONING.fullmatch(turn.content)
        if match is None:
            return cls(turn.reasoning, turn.content, None)
        before, reasoning, after, content = match.groups()
        return cls(reasoning, content, (before, after))

    @property
    def has_reasoning(self) -> bool:
        """Whether the turn contains reasoning."""
        return bool(self.reasoning.strip())

    def replace_in(self, turn: Turn, *, reasoning: str, content: str) -> Turn:
        """Return a copy of the turn with this reasoning and content, in the same layout."""
        if self.tags is None:
            return replace(turn, reasoning=reasoning, content=content)
        before, after = self.tags
        return replace(turn, content=f"{before}{reasoning}{after}{content}")


@dataclass(frozen=True)
class AnchoredTurns:
    """Turns whose reasoning and content are replaced by anchors, which map to the replaced text."""

    turns: tuple[Turn, ...]
    values: Mapping[str, str]

    @classmethod
    def build(cls, turns: Sequence[Turn]) -> "AnchoredTurns":
        """Replace the reasoning and the content of all assistant turns; empty text is kept."""
        values: dict[str, str] = {}
        anchored: list[Turn] = []
        for index, turn in enumerate(turns):
            if turn.role is not Role.ASSISTANT:
                anchored.append(turn)
                continue
            text = AssistantText.split(turn)
            reasoning = get_reasoning_anchor(index) if text.has_reasoning else text.reasoning
            content = get_content_anchor(index) if text.content.strip() else text.content
            values |= {reasoning: text.reasoning} if text.has_reasoning else {}
            values |= {content: text.content} if text.content.strip() else {}
            anchored.append(text.replace_in(turn, reasoning=reasoning, content=content))
        return cls(tuple(anchored), values)

    def locate(self, text: str, anchored_text: str) -> dict[str, Span] | None:
        """Return the range in `text` of each value whose anchor is in `anchored_text`, the rendered anchored turns.

        Returns None if replacing the anchors with their values does not reproduce `text`, because the template rewrites
        the values.
        """
        if not self.values:
            return {} if anchored_text == text else None
        first, *pieces = re.split(f"({'|'.join(map(re.escape, self.values))})", anchored_text)
        if not text.startswith(first):
            return None
        spans: dict[str, Span] = {}
        position = len(first)
        for anchor, following in zip(pieces[::2], pieces[1::2], strict=True):
            variants = (v for v in _list_variants(self.values[anchor]) if text.startswith(v + following, position))
            value = next(variants, None)
            if value is None or anchor in spans:
                return None
            spans[anchor] = (position, position + len(value))
            position += len(value) + len(following)
        return spans if position == len(text) else None


@dataclass(frozen=True)
class Probe:
    """Turns whose tool calls and other messages are replaced by anchors, which the rendered text must contain."""

    turns: tuple[Turn, ...]
    fields: Mapping[str, str]  # description of the replaced field by anchor

    @classmethod
    def build(cls, turns: Sequence[Turn]) -> "Probe":
        """Replace the names and arguments of all tool calls and the content of tool and developer turns."""
        fields: dict[str, str] = {}
        probed = []
        for index, turn in enumerate(turns):
            subject = f"turn {index} ({turn.role})"
            if turn.role in (Role.TOOL, Role.DEVELOPER) and turn.content.strip():
                anchor = get_content_anchor(index)
                fields[anchor] = subject
                turn = replace(turn, content=anchor, media=())
            calls = []
            for number, call in enumerate(turn.tool_calls):
                anchors = _CALL_ANCHOR.format(index, number), _ARGUMENT_ANCHOR.format(index, number)
                fields |= dict.fromkeys(anchors, f"tool_calls[{number}] ({call.name}) of {subject}")
                calls.append(ToolCall(anchors[0], {anchors[1]: "x"}, f'{{"{anchors[1]}": "x"}}', call.call_id))
            probed.append(replace(turn, tool_calls=tuple(calls)))
        return cls(tuple(probed), fields)

    def find_missing(self, probed_text: str) -> str | None:
        """Return the first field that `probed_text`, the rendered probe, lacks or contains as a Python literal."""
        return next(
            (
                field
                for anchor, field in self.fields.items()
                if anchor not in probed_text or f"{{'{anchor}'" in probed_text
            ),
            None,
        )


def get_content_anchor(index: int) -> str:
    """Return the anchor for the content of a turn."""
    return _CONTENT_ANCHOR.format(index)


def get_reasoning_anchor(index: int) -> str:
    """Return the anchor for the reasoning of a turn."""
    return _REASONING_ANCHOR.format(index)


def _list_variants(value: str) -> Iterator[str]:
    """Yield the forms in which templates render a text: unchanged, stripped or inside a JSON string."""
    yield from (value, value.strip(), value.lstrip("\n"), value.strip("\n"), value.lstrip(), value.rstrip())
    yield to_json_text(value)
