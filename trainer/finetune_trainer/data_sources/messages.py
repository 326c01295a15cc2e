"""Parses columns of OpenAI or ShareGPT messages into the turns of a conversation."""

from dataclasses import dataclass, replace
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
from finetune_trainer.data_sources.readers import Row, describe_value
from finetune_trainer.errors import DatasetError


class Role(StrEnum):
    """Role of a turn in a conversation."""

    SYSTEM = "system"
    USER = "user"
    ASSISTANT = "assistant"


_SHAREGPT_ROLES = {
    "system": Role.SYSTEM,
    "human": Role.USER,
    "user": Role.USER,
    "gpt": Role.ASSISTANT,
    "assistant": Role.ASSISTANT,
}


@dataclass(frozen=True)
class Turn:
    """One message of a conversation."""

    role: Role
    content: str
    weight: float = 1.0  # loss weight of the tokens; used only for assistant turns
    media: tuple[MediaItem, ...] = ()  # one item per MEDIA_MARK in the content


def parse_messages(row: Row, name: str) -> list[Turn]:
    """Parse a column of messages with role, content and optional weight into turns. Raises: DatasetError."""
    turns = []
    for index, value in enumerate(get_list(row, name)):
        location = f"{row.origin}, column {name}[{index}]"
        message = check_object(location, value)
        role = message.get("role")
        if role not in tuple(Role):
            raise DatasetError(f"{location}.role: expected system, user or assistant, found {describe_value(role)}")
        content, media = _parse_content(row, f"{location}.content", message.get("content"))
        weight = _parse_weight(f"{location}.weight", message.get("weight"))
        turns.append(Turn(Role(str(role)), content, weight, media))
    return turns


def parse_sharegpt_messages(row: Row, name: str) -> list[Turn]:
    """Parse a column of ShareGPT messages (with `from` and `value`) into turns. Raises: DatasetError."""
    return [
        _parse_sharegpt_turn(f"{row.origin}, column {name}[{index}]", message)
        for index, message in enumerate(get_list(row, name))
    ]


def parse_sharegpt_message(row: Row, name: str) -> Turn:
    """Parse a column that contains one ShareGPT message into a turn. Raises: DatasetError."""
    return _parse_sharegpt_turn(f"{row.origin}, column {name}", row.columns[name])


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


def _parse_sharegpt_turn(location: str, value: object) -> Turn:
    message = check_object(location, value)
    role = _SHAREGPT_ROLES.get(str(message.get("from")))
    if role is None:
        raise DatasetError(
            f"{location}.from: expected human, gpt or system, found {describe_value(message.get('from'))}"
        )
    return Turn(role, check_text(f"{location}.value", message.get("value")))


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
