"""What a row means: a conversation, or a prompt with its completion. Five spellings are understood."""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum

from finetune_trainer.data_sources.media import MARK, Kind, Picture, column_pictures, part_picture, place_pictures
from finetune_trainer.data_sources.readers import Row, describe
from finetune_trainer.errors import DatasetError


class Role(StrEnum):
    SYSTEM = "system"
    USER = "user"
    ASSISTANT = "assistant"


@dataclass(frozen=True)
class Turn:
    role: Role
    content: str
    weight: float = 1.0  # of its tokens in the loss, if it is the assistant's
    pictures: tuple[Picture, ...] = ()  # each where a MARK is in the content


@dataclass(frozen=True)
class Conversation:
    """Turns to be rendered with the chat template; the assistant's are learned."""

    place: str
    turns: tuple[Turn, ...]


@dataclass(frozen=True)
class Completion:
    """Plain text, no template: the completion is learned."""

    place: str
    prompt: str
    completion: str


Example = Conversation | Completion

_SHAREGPT_ROLES = {
    "system": Role.SYSTEM,
    "human": Role.USER,
    "user": Role.USER,
    "gpt": Role.ASSISTANT,
    "assistant": Role.ASSISTANT,
}


def parse_example(row: Row) -> Example:
    """By the columns it has; raises DatasetError naming the place, the column, what was expected and what was found."""
    for columns, parse in _SPELLINGS:
        if all(column in row.columns for column in columns):
            return parse(row)
    wanted = "; ".join(" + ".join(columns) for columns, _ in _SPELLINGS)
    raise DatasetError(f"{row.place}: expected columns {wanted}; found {', '.join(map(str, row.columns)) or 'none'}")


def _messages(row: Row) -> Conversation:
    return _conversation(row, messages_in(row, "messages"))


def messages_in(row: Row, name: str) -> list[Turn]:
    """The turns of a column of messages with role and content, and weight if they like."""
    turns = []
    for index, message in enumerate(list_in(row, name)):
        where = f"{row.place}, column {name}[{index}]"
        found = _object(where, message)
        role = found.get("role")
        if role not in tuple(Role):
            raise DatasetError(f"{where}.role: expected system, user or assistant, found {describe(role)}")
        content, pictures = _content(row, f"{where}.content", found.get("content"))
        turns.append(Turn(Role(str(role)), content, _weight(f"{where}.weight", found.get("weight")), pictures))
    return turns


def _conversations(row: Row) -> Conversation:
    return _conversation(row, sharegpt_in(row, "conversations"))


def sharegpt_in(row: Row, name: str) -> list[Turn]:
    """The turns of a column of messages with from and value, after the row's system prompt."""
    turns = system_of(row)
    for index, message in enumerate(list_in(row, name)):
        turns.append(sharegpt_turn(f"{row.place}, column {name}[{index}]", message))
    return turns


def sharegpt_turn(where: str, message: object) -> Turn:
    found = _object(where, message)
    role = _SHAREGPT_ROLES.get(str(found.get("from")))
    if role is None:
        raise DatasetError(f"{where}.from: expected human, gpt or system, found {describe(found.get('from'))}")
    return Turn(role, _text(f"{where}.value", found.get("value")))


def _alpaca(row: Row) -> Conversation:
    return _conversation(row, [*alpaca_prompt(row), Turn(Role.ASSISTANT, text_in(row, "output"))])


def alpaca_prompt(row: Row) -> list[Turn]:
    """System prompt and question of a row with instruction and, maybe, input."""
    instruction = text_in(row, "instruction")
    extra = text_in(row, "input") if row.columns.get("input") else ""
    question = f"{instruction}\n{extra}" if extra else instruction
    return [*system_of(row), Turn(Role.USER, question)]


def _query_response(row: Row) -> Conversation:
    return _conversation(row, [*query_prompt(row), Turn(Role.ASSISTANT, text_in(row, "response"))])


def query_prompt(row: Row) -> list[Turn]:
    """System prompt, earlier turns and question of a row with query and, maybe, history."""
    turns = system_of(row)
    history = list_in(row, "history") if row.columns.get("history") else []
    for index, pair in enumerate(history):
        where = f"{row.place}, column history[{index}]"
        if not isinstance(pair, list) or len(pair) != 2:
            raise DatasetError(f"{where}: expected a list of query and response, found {describe(pair)}")
        turns += [Turn(Role.USER, _text(where, pair[0])), Turn(Role.ASSISTANT, _text(where, pair[1]))]
    return [*turns, Turn(Role.USER, text_in(row, "query"))]


def _prompt_completion(row: Row) -> Completion:
    for kind in Kind:
        if column_pictures(row, kind):
            raise DatasetError(f"{row.place}: a prompt with its completion shows no {kind}s; give the row as messages")
    completion = text_in(row, "completion")
    if not completion:
        raise DatasetError(f"{row.place}, column completion: expected text to learn, found none")
    return Completion(row.place, text_in(row, "prompt"), completion)


_SPELLINGS: tuple[tuple[tuple[str, ...], Callable[[Row], Example]], ...] = (
    (("messages",), _messages),
    (("conversations",), _conversations),
    (("instruction", "output"), _alpaca),
    (("prompt", "completion"), _prompt_completion),
    (("query", "response"), _query_response),
)


def _conversation(row: Row, turns: list[Turn]) -> Conversation:
    turns = with_pictures(row, turns)
    for index, turn in enumerate(turns):
        if turn.role is Role.ASSISTANT and not turn.content.strip():
            raise DatasetError(f"{row.place}: turn {index} is the assistant's and empty; expected text to learn")
    if not any(turn.role is Role.ASSISTANT for turn in turns):
        raise DatasetError(f"{row.place}: expected at least one turn of the assistant, found none; nothing to learn")
    return Conversation(row.place, tuple(turns))


def with_pictures(row: Row, turns: list[Turn]) -> list[Turn]:
    """The turns with what the row's columns show in them; only the user shows images and videos."""
    placed = place_pictures(row, [turn.content for turn in turns], [turn.pictures for turn in turns])
    seeing = [
        replace(turn, content=content, pictures=pictures)
        for turn, (content, pictures) in zip(turns, placed, strict=True)
    ]
    for index, turn in enumerate(seeing):
        if turn.pictures and turn.role is not Role.USER:
            raise DatasetError(
                f"{row.place}: turn {index} is the {turn.role}'s and shows {turn.pictures[0]}; only the user's may"
            )
    return seeing


def system_of(row: Row) -> list[Turn]:
    """The system prompt of a row that keeps it in a column of its own."""
    if not row.columns.get("system"):
        return []
    return [Turn(Role.SYSTEM, text_in(row, "system"))]


def text_in(row: Row, name: str) -> str:
    """The text of a column."""
    return _text(f"{row.place}, column {name}", row.columns[name])


def list_in(row: Row, name: str) -> list[object]:
    """A list, or in a CSV file the JSON text of one."""
    value = row.columns[name]
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except json.JSONDecodeError as error:
            raise DatasetError(
                f"{row.place}, column {name}: expected a list of turns, found text that is no JSON"
                f" (at character {error.pos + 1}: {error.msg})"
            ) from error
    if not isinstance(value, list) or not value:
        raise DatasetError(f"{row.place}, column {name}: expected a list of turns, found {describe(value)}")
    return value


def _object(where: str, value: object) -> dict[str, object]:
    if not isinstance(value, dict):
        raise DatasetError(f"{where}: expected an object, found {describe(value)}")
    return value


def _text(where: str, value: object) -> str:
    if not isinstance(value, str):
        raise DatasetError(f"{where}: expected text, found {describe(value)}")
    return value


def _weight(where: str, value: object) -> float:
    if value is None:
        return 1.0
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        raise DatasetError(f"{where}: expected a number from 0 to 1, found {describe(value)}")
    return float(value)


def _content(row: Row, where: str, value: object) -> tuple[str, tuple[Picture, ...]]:
    """Text, or OpenAI's list of parts: text, images and videos."""
    if not isinstance(value, list):
        return _text(where, value), ()
    texts: list[str] = []
    pictures: list[Picture] = []
    for index, part in enumerate(value):
        at = f"{where}[{index}]"
        found = _object(at, part)
        kind = str(found.get("type")).removesuffix("_url")
        if kind == "text":
            texts.append(_text(f"{at}.text", found.get("text")))
        elif kind in tuple(Kind):
            sign, picture = _shown(row, at, found, Kind(kind))
            texts.append(sign)
            pictures += [picture] if picture else []
        else:
            raise DatasetError(f"{at}.type: expected text, image or video, found {describe(found.get('type'))}")
    return "".join(texts), tuple(pictures)


def _shown(row: Row, where: str, part: dict[str, object], kind: Kind) -> tuple[str, Picture | None]:
    """What stands in the words for a part that shows something, and that, if it is not in a column."""
    picture = part_picture(row, where, part, kind)
    if picture is None and not column_pictures(row, kind):
        raise DatasetError(f"{where}: expected the {kind} here ({kind}, path or {kind}_url) or in a column {kind}s")
    return (MARK, picture) if picture else (kind.tag, None)
