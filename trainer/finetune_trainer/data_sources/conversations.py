"""Parses a row into a conversation, or into a prompt and its completion, from one of five column formats."""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum

from finetune_trainer.data_sources.media import (
    MEDIA_MARK,
    MediaItem,
    Modality,
    assign_media,
    parse_media_columns,
    parse_part_media,
)
from finetune_trainer.data_sources.readers import Row, describe_value
from finetune_trainer.errors import DatasetError


class Role(StrEnum):
    """Who a turn of a conversation is from."""

    SYSTEM = "system"
    USER = "user"
    ASSISTANT = "assistant"


@dataclass(frozen=True)
class Turn:
    """One message of a conversation."""

    role: Role
    content: str
    weight: float = 1.0  # of its tokens in the loss; used for assistant turns only
    media: tuple[MediaItem, ...] = ()  # one for each MEDIA_MARK in the content


@dataclass(frozen=True)
class Conversation:
    """Turns to render with the chat template; the loss covers the assistant turns."""

    origin: str
    turns: tuple[Turn, ...]


@dataclass(frozen=True)
class PromptCompletion:
    """Plain text without a chat template; the loss covers the completion."""

    origin: str
    prompt: str
    completion: str


Example = Conversation | PromptCompletion

_SHAREGPT_ROLES = {
    "system": Role.SYSTEM,
    "human": Role.USER,
    "user": Role.USER,
    "gpt": Role.ASSISTANT,
    "assistant": Role.ASSISTANT,
}


def parse_example(row: Row) -> Example:
    """Parse a row in the first column format whose columns it has.

    Raises: DatasetError naming the row, the column, the expected and the found value.
    """
    for columns, parse in _COLUMN_FORMATS:
        if all(column in row.columns for column in columns):
            return parse(row)
    expected = "; ".join(" + ".join(columns) for columns, _ in _COLUMN_FORMATS)
    raise DatasetError(f"{row.origin}: expected columns {expected}; found {', '.join(map(str, row.columns)) or 'none'}")


def _parse_messages_format(row: Row) -> Conversation:
    return _build_conversation(row, parse_messages(row, "messages"))


def parse_messages(row: Row, name: str) -> list[Turn]:
    """Return the turns of a column of messages with role, content and optionally weight."""
    turns = []
    for index, value in enumerate(get_list(row, name)):
        location = f"{row.origin}, column {name}[{index}]"
        message = _check_object(location, value)
        role = message.get("role")
        if role not in tuple(Role):
            raise DatasetError(f"{location}.role: expected system, user or assistant, found {describe_value(role)}")
        content, media = _parse_content(row, f"{location}.content", message.get("content"))
        weight = _parse_weight(f"{location}.weight", message.get("weight"))
        turns.append(Turn(Role(str(role)), content, weight, media))
    return turns


def _parse_sharegpt_format(row: Row) -> Conversation:
    return _build_conversation(row, parse_sharegpt(row, "conversations"))


def parse_sharegpt(row: Row, name: str) -> list[Turn]:
    """Return the system prompt of the row and the turns of a column of messages with from and value."""
    turns = parse_system_prompt(row)
    for index, message in enumerate(get_list(row, name)):
        turns.append(parse_sharegpt_turn(f"{row.origin}, column {name}[{index}]", message))
    return turns


def parse_sharegpt_turn(location: str, value: object) -> Turn:
    """Return the turn of a message with from and value; location is its place in the row, for error messages."""
    message = _check_object(location, value)
    role = _SHAREGPT_ROLES.get(str(message.get("from")))
    if role is None:
        raise DatasetError(
            f"{location}.from: expected human, gpt or system, found {describe_value(message.get('from'))}"
        )
    return Turn(role, _check_text(f"{location}.value", message.get("value")))


def _parse_alpaca_format(row: Row) -> Conversation:
    return _build_conversation(row, [*parse_alpaca_prompt(row), Turn(Role.ASSISTANT, get_text(row, "output"))])


def parse_alpaca_prompt(row: Row) -> list[Turn]:
    """Return the system prompt and the user turn of a row with instruction and optionally input."""
    instruction = get_text(row, "instruction")
    extra = get_text(row, "input") if row.columns.get("input") else ""
    content = f"{instruction}\n{extra}" if extra else instruction
    return [*parse_system_prompt(row), Turn(Role.USER, content)]


def _parse_query_response_format(row: Row) -> Conversation:
    return _build_conversation(row, [*parse_query_prompt(row), Turn(Role.ASSISTANT, get_text(row, "response"))])


def parse_query_prompt(row: Row) -> list[Turn]:
    """Return the system prompt, the earlier turns and the user turn of a row with query and optionally history."""
    turns = parse_system_prompt(row)
    history = get_list(row, "history") if row.columns.get("history") else []
    for index, pair in enumerate(history):
        location = f"{row.origin}, column history[{index}]"
        if not isinstance(pair, list) or len(pair) != 2:
            raise DatasetError(f"{location}: expected a list of query and response, found {describe_value(pair)}")
        query, response = (_check_text(location, text) for text in pair)
        turns += [Turn(Role.USER, query), Turn(Role.ASSISTANT, response)]
    return [*turns, Turn(Role.USER, get_text(row, "query"))]


def _parse_prompt_completion_format(row: Row) -> PromptCompletion:
    for modality in Modality:
        if parse_media_columns(row, modality):
            raise DatasetError(
                f"{row.origin}: a row with prompt and completion cannot have {modality}s; write the row as messages"
            )
    completion = get_text(row, "completion")
    if not completion:
        raise DatasetError(f"{row.origin}, column completion: expected text to learn, found none")
    return PromptCompletion(row.origin, get_text(row, "prompt"), completion)


_COLUMN_FORMATS: tuple[tuple[tuple[str, ...], Callable[[Row], Example]], ...] = (
    (("messages",), _parse_messages_format),
    (("conversations",), _parse_sharegpt_format),
    (("instruction", "output"), _parse_alpaca_format),
    (("prompt", "completion"), _parse_prompt_completion_format),
    (("query", "response"), _parse_query_response_format),
)


def _build_conversation(row: Row, turns: list[Turn]) -> Conversation:
    turns = attach_media(row, turns)
    for index, turn in enumerate(turns):
        if turn.role is Role.ASSISTANT and not turn.content.strip():
            raise DatasetError(f"{row.origin}: turn {index} (assistant) is empty; expected text to learn")
    if not any(turn.role is Role.ASSISTANT for turn in turns):
        raise DatasetError(f"{row.origin}: expected at least one assistant turn, found none; there is nothing to learn")
    return Conversation(row.origin, tuple(turns))


def attach_media(row: Row, turns: list[Turn]) -> list[Turn]:
    """Return the turns with the images and videos of the row's columns.

    Raises: DatasetError if a turn other than the user's contains media.
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


def parse_system_prompt(row: Row) -> list[Turn]:
    """Return the system prompt from the column `system` as a list of one turn; empty without such a column."""
    if not row.columns.get("system"):
        return []
    return [Turn(Role.SYSTEM, get_text(row, "system"))]


def get_text(row: Row, name: str) -> str:
    """Return the text of a column. Raises: DatasetError if it contains something else."""
    return _check_text(f"{row.origin}, column {name}", row.columns[name])


def get_list(row: Row, name: str) -> list[object]:
    """Return the list of a column, which may also be JSON text, as in CSV files. Raises: DatasetError."""
    value = row.columns[name]
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except json.JSONDecodeError as error:
            raise DatasetError(
                f"{row.origin}, column {name}: expected a list of turns, found text that is not JSON"
                f" (at character {error.pos + 1}: {error.msg})"
            ) from error
    if not isinstance(value, list) or not value:
        raise DatasetError(f"{row.origin}, column {name}: expected a list of turns, found {describe_value(value)}")
    return value


def _check_object(location: str, value: object) -> dict[str, object]:
    if not isinstance(value, dict):
        raise DatasetError(f"{location}: expected an object, found {describe_value(value)}")
    return value


def _check_text(location: str, value: object) -> str:
    if not isinstance(value, str):
        raise DatasetError(f"{location}: expected text, found {describe_value(value)}")
    return value


def _parse_weight(location: str, value: object) -> float:
    if value is None:
        return 1.0
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        raise DatasetError(f"{location}: expected a number from 0 to 1, found {describe_value(value)}")
    return float(value)


def _parse_content(row: Row, location: str, value: object) -> tuple[str, tuple[MediaItem, ...]]:
    """Return text and media of a message's content, which is text or a list of content parts as OpenAI has them."""
    if not isinstance(value, list):
        return _check_text(location, value), ()
    texts: list[str] = []
    media: list[MediaItem] = []
    for index, part_value in enumerate(value):
        part_location = f"{location}[{index}]"
        part = _check_object(part_location, part_value)
        part_type = str(part.get("type")).removesuffix("_url")
        if part_type == "text":
            texts.append(_check_text(f"{part_location}.text", part.get("text")))
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
    """Return the mark and the item of a media part; or the tag and None if the item is in the row's column."""
    item = parse_part_media(row, location, part, modality)
    if item is None and not parse_media_columns(row, modality):
        raise DatasetError(
            f"{location}: expected the {modality} here ({modality}, path or {modality}_url) or in a column {modality}s"
        )
    return (MEDIA_MARK, item) if item else (modality.tag, None)
