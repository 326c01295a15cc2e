"""Parses columns of OpenAI or ShareGPT messages into the turns of a conversation."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

from finetune_trainer.data_sources.column_values import check_object, check_text, get_list
from finetune_trainer.data_sources.media import (
    MEDIA_MARK,
    MediaItem,
    Modality,
    assign_media,
    parse_content_part_media,
    parse_media_columns,
)
from finetune_trainer.data_sources.message_keys import REASONING_KEYS, find_ignored_keys
from finetune_trainer.data_sources.readers import Row, describe_value
from finetune_trainer.data_sources.tool_calls import ToolCall, parse_tool_calls
from finetune_trainer.errors import DatasetError


class Role(StrEnum):
    """Role of a turn in a conversation."""

    SYSTEM = "system"
    DEVELOPER = "developer"
    USER = "user"
    ASSISTANT = "assistant"
    TOOL = "tool"


@dataclass(frozen=True)
class Turn:
    """One message of a conversation."""

    role: Role
    content: str
    weight: float = 1.0  # loss weight of the tokens; used only for assistant turns
    media: tuple[MediaItem, ...] = ()  # one item per MEDIA_MARK in the content
    reasoning: str = ""  # of an assistant turn
    tool_calls: tuple[ToolCall, ...] = ()  # of an assistant turn
    tool_call_id: str | None = None  # of a tool turn
    name: str | None = None  # of a tool turn
    ignored_keys: tuple[str, ...] = field(default=(), compare=False)

    @property
    def is_empty(self) -> bool:
        """Whether the turn has neither text nor tool calls."""
        return not (self.content.strip() or self.reasoning.strip() or self.tool_calls)


@dataclass(frozen=True)
class MessageFormat:
    """Names of the keys and roles of a message."""

    role_key: str
    content_key: str
    roles: Mapping[str, Role]
    call_role: str  # role of a message whose content is a tool call, or a list of them, as JSON

    @property
    def known_keys(self) -> tuple[str, ...]:
        """Keys that are honoured in a message of any role."""
        return (self.role_key, self.content_key, "weight", "tool_calls", *REASONING_KEYS)


OPENAI = MessageFormat(
    "role",
    "content",
    {
        "system": Role.SYSTEM,
        "developer": Role.DEVELOPER,
        "user": Role.USER,
        "assistant": Role.ASSISTANT,
        "tool": Role.TOOL,
        "tool_response": Role.TOOL,
    },
    "tool_call",
)
SHAREGPT = MessageFormat(
    "from",
    "value",
    {
        "human": Role.USER,
        "gpt": Role.ASSISTANT,
        "system": Role.SYSTEM,
        "observation": Role.TOOL,
        "tool": Role.TOOL,
        "user": Role.USER,
        "assistant": Role.ASSISTANT,
    },
    "function_call",
)


def parse_messages(row: Row, name: str, message_format: MessageFormat = OPENAI) -> list[Turn]:
    """Parse a column of messages into turns.

    A message whose role is that of a tool call continues the assistant turn before it. Raises: DatasetError.
    """
    turns: list[Turn] = []
    for index, value in enumerate(get_list(row, name)):
        location = f"{row.origin}, column {name}[{index}]"
        message = check_object(location, value)
        if message.get(message_format.role_key) != message_format.call_role:
            turns.append(_parse_message(row, location, message, message_format))
            continue
        turn = _parse_call_message(location, message, message_format)
        if turns and turns[-1].role is Role.ASSISTANT and turns[-1].weight == turn.weight:
            previous = turns.pop()
            turn = replace(
                previous,
                tool_calls=(*previous.tool_calls, *turn.tool_calls),
                ignored_keys=(*previous.ignored_keys, *turn.ignored_keys),
            )
        turns.append(turn)
    return turns


def parse_sharegpt_message(row: Row, name: str) -> Turn:
    """Parse a column that contains one ShareGPT message into a turn. Raises: DatasetError."""
    location = f"{row.origin}, column {name}"
    message = check_object(location, row.columns[name])
    if message.get(SHAREGPT.role_key) == SHAREGPT.call_role:
        return _parse_call_message(location, message, SHAREGPT)
    return _parse_message(row, location, message, SHAREGPT)


def attach_media(row: Row, turns: list[Turn]) -> list[Turn]:
    """Add the images and videos of the row's columns to the turns.

    Raises: DatasetError if a turn that is not a user turn contains media.
    """
    assigned = assign_media(row, [turn.content for turn in turns], [turn.media for turn in turns])
    with_media = [
        replace(turn, content=content, media=media) for turn, (content, media) in zip(turns, assigned, strict=True)
    ]
    for index, turn in enumerate(with_media):
        if turn.media and turn.role is not Role.USER:
            raise DatasetError(
                f"{row.origin}: turn {index} ({turn.role}) contains {turn.media[0]}; only user turns may contain images"
                " and videos"
            )
    return with_media


def _parse_message(row: Row, location: str, message: dict[str, object], message_format: MessageFormat) -> Turn:
    role = _parse_role(location, message, message_format)
    known = (*message_format.known_keys, *(("tool_call_id", "name") if role is Role.TOOL else ()))
    ignored = find_ignored_keys(location, message, known)
    reasoning = _parse_reasoning(location, message)
    tool_calls = parse_tool_calls(f"{location}.tool_calls", message.get("tool_calls"))
    if role is not Role.ASSISTANT and (reasoning or tool_calls):
        key = "tool_calls" if tool_calls else "reasoning"
        raise DatasetError(f"{location}: expected {key} only in assistant messages, found it in a {role} message")
    content: object = message.get(message_format.content_key)
    if content is None and (reasoning or tool_calls):
        content = ""
    text, media = _parse_content(row, f"{location}.{message_format.content_key}", content)
    is_tool = role is Role.TOOL
    return Turn(
        role,
        text,
        _parse_weight(f"{location}.weight", message.get("weight")),
        media,
        reasoning,
        tool_calls,
        _parse_optional_text(f"{location}.tool_call_id", message.get("tool_call_id")) if is_tool else None,
        _parse_optional_text(f"{location}.name", message.get("name")) if is_tool else None,
        ignored,
    )


def _parse_call_message(location: str, message: dict[str, object], message_format: MessageFormat) -> Turn:
    """Parse a message whose content is a tool call, or a list of tool calls, as JSON."""
    key = message_format.content_key
    ignored = find_ignored_keys(location, message, (message_format.role_key, key, "weight"))
    tool_calls = parse_tool_calls(f"{location}.{key}", message.get(key))
    if not tool_calls:
        raise DatasetError(f"{location}.{key}: expected a tool call as JSON, found {describe_value(message.get(key))}")
    weight = _parse_weight(f"{location}.weight", message.get("weight"))
    return Turn(Role.ASSISTANT, "", weight, tool_calls=tool_calls, ignored_keys=ignored)


def _parse_role(location: str, message: dict[str, object], message_format: MessageFormat) -> Role:
    value = message.get(message_format.role_key)
    role = message_format.roles.get(value) if isinstance(value, str) else None
    if role is None:
        names = ", ".join(message_format.roles)
        raise DatasetError(
            f"{location}.{message_format.role_key}: expected {names} or {message_format.call_role}, found"
            f" {describe_value(value)}"
        )
    return role


def _parse_reasoning(location: str, message: dict[str, object]) -> str:
    """Return the reasoning of a message, whose key differs between tools."""
    values = {key: check_text(f"{location}.{key}", message[key]) for key in REASONING_KEYS if message.get(key)}
    if len(set(values.values())) > 1:
        raise DatasetError(f"{location}: expected one reasoning text, found different ones in {' and '.join(values)}")
    return next(iter(values.values()), "")


def _parse_optional_text(location: str, value: object) -> str | None:
    return None if value is None else check_text(location, value)


def _parse_weight(location: str, value: object) -> float:
    if value is None:
        return 1.0
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        raise DatasetError(f"{location}: expected a number from 0 to 1, found {describe_value(value)}")
    return float(value)


def _parse_content(row: Row, location: str, value: object) -> tuple[str, tuple[MediaItem, ...]]:
    """Return the text and the media of message content, which is text or a list of OpenAI content parts."""
    if not isinstance(value, list):
        return check_text(location, value), ()
    texts: list[str] = []
    media: list[MediaItem] = []
    for index, part_value in enumerate(value):
        part_location = f"{location}[{index}]"
        part = check_object(part_location, part_value)
        part_type = str(part.get("type")).removesuffix("_url")
        if part_type == "text":
            texts.append(check_text(f"{part_location}.text", part.get("text")))
        elif part_type in tuple(Modality):
            mark, item = _parse_media_part(row, part_location, part, Modality(part_type))
            texts.append(mark)
            media += [item] if item else []
        else:
            raise DatasetError(
                f"{part_location}.type: expected text, image or video, found {describe_value(part.get('type'))}"
            )
    return "".join(texts), tuple(media)


def _parse_media_part(
    row: Row, location: str, part: dict[str, object], modality: Modality
) -> tuple[str, MediaItem | None]:
    """Return MEDIA_MARK and the media item of a content part, or a tag and None if the item is in a media column."""
    item = parse_content_part_media(row, location, part, modality)
    if item is None and not parse_media_columns(row, modality):
        raise DatasetError(
            f"{location}: expected the {modality} here ({modality}, path or {modality}_url) or in a column {modality}s"
        )
    return (MEDIA_MARK, item) if item else (modality.tag, None)
