"""Defines the supported column formats and the functions that read them.

SFT reads a prompt with one completion, DPO a prompt with two. SFT and DPO use the same reader functions.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from finetune_trainer.data_sources.column_values import check_text, get_list, get_text
from finetune_trainer.data_sources.messages import (
    SHAREGPT,
    Role,
    Turn,
    parse_messages,
    parse_sharegpt_message,
)
from finetune_trainer.data_sources.readers import Row, describe_value
from finetune_trainer.errors import DatasetError

Columns = tuple[str, ...]


@dataclass(frozen=True)
class RowTurns:
    """Turns of the prompt, which may be empty, and of each completion of a row."""

    prompt: list[Turn]
    completions: tuple[list[Turn], ...]

    @property
    def conversations(self) -> tuple[list[Turn], ...]:
        """One conversation per completion: the prompt followed by the completion."""
        return tuple([*self.prompt, *completion] for completion in self.completions)


@dataclass(frozen=True)
class RowText:
    """Prompt and completions of a row as plain text, which is not rendered with a chat template."""

    prompt: str
    completions: tuple[str, ...]


@dataclass(frozen=True)
class ColumnFormat:
    """Defines the prompt and completion columns of a row format and the function that reads them.

    completion_columns: one column for SFT; the columns of the chosen and the rejected completion for DPO.
    """

    prompt_columns: Columns
    completion_columns: Columns
    reader: Callable[[Row, Columns], RowTurns | RowText]
    requires_lists: bool = False  # the format matches only if all columns contain lists

    @property
    def columns(self) -> Columns:
        """Names of all columns of the format."""
        return (*self.prompt_columns, *self.completion_columns)

    def matches(self, row: Row) -> bool:
        """Return whether the row has the columns that this format requires."""
        if not all(name in row.columns for name in self.columns):
            return False
        return not self.requires_lists or all(isinstance(row.columns[name], list) for name in self.columns)

    def read(self, row: Row) -> RowTurns | RowText:
        """Read the prompt and the completions. Raises: DatasetError with row, column, expected and found value."""
        return self.reader(row, self.completion_columns)


def find_format(row: Row, formats: Sequence[ColumnFormat]) -> ColumnFormat | None:
    """Return the first format that matches the row."""
    return next((column_format for column_format in formats if column_format.matches(row)), None)


def _read_messages(row: Row, completion_columns: Columns) -> RowTurns:
    """Read columns of messages that include the prompt."""
    return RowTurns([], tuple(_add_system_prompt(row, parse_messages(row, name)) for name in completion_columns))


def _read_rejected_response(row: Row, completion_columns: Columns) -> RowTurns:
    """Read a conversation that ends with the chosen completion, and the text of the rejected completion."""
    messages, rejected_response = completion_columns
    turns = _add_system_prompt(row, parse_messages(row, messages))
    if turns[-1].role is not Role.ASSISTANT:
        raise DatasetError(
            f"{row.origin}, column {messages}: expected an assistant turn at the end, which {rejected_response}"
            f" replaces; found a {turns[-1].role} turn"
        )
    return RowTurns(turns[:-1], (turns[-1:], _parse_completion(row, rejected_response)))


def _read_message_lists(row: Row, completion_columns: Columns) -> RowTurns:
    """Read columns of messages: whole conversations, or completions of the `prompt` column."""
    turns = tuple(parse_messages(row, name) for name in completion_columns)
    prompt = row.columns.get("prompt")
    if isinstance(prompt, list):
        return RowTurns(_add_system_prompt(row, parse_messages(row, "prompt")), turns)
    if isinstance(prompt, str) and turns[0][0].role is Role.ASSISTANT:
        return RowTurns([*_parse_system_prompt(row), Turn(Role.USER, prompt)], turns)
    return RowTurns([], tuple(_add_system_prompt(row, conversation) for conversation in turns))


def _read_sharegpt(row: Row, completion_columns: Columns) -> RowTurns:
    """Read the system prompt of the row and columns of ShareGPT messages (with `from` and `value`)."""
    conversations = (parse_messages(row, name, SHAREGPT) for name in completion_columns)
    return RowTurns([], tuple(_add_system_prompt(row, turns) for turns in conversations))


def _read_sharegpt_completions(row: Row, completion_columns: Columns) -> RowTurns:
    """Read a prompt of ShareGPT messages, and columns that contain one ShareGPT message each."""
    prompt = _add_system_prompt(row, parse_messages(row, "conversations", SHAREGPT))
    return RowTurns(prompt, tuple([parse_sharegpt_message(row, name)] for name in completion_columns))


def _read_alpaca(row: Row, completion_columns: Columns) -> RowTurns:
    """Read the system prompt, the instruction, its optional input, and the completions of an Alpaca row."""
    instruction = get_text(row, "instruction")
    extra = get_text(row, "input") if row.columns.get("input") else ""
    content = f"{instruction}\n{extra}" if extra else instruction
    prompt = [*_parse_system_prompt(row), Turn(Role.USER, content)]
    return RowTurns(prompt, tuple(_parse_completion(row, name) for name in completion_columns))


def _read_query(row: Row, completion_columns: Columns) -> RowTurns:
    """Read the system prompt, the query with its history, and the completions of a query and response row."""
    turns = _parse_system_prompt(row)
    history = get_list(row, "history") if row.columns.get("history") else []
    for index, pair in enumerate(history):
        location = f"{row.origin}, column history[{index}]"
        if not isinstance(pair, list) or len(pair) != 2:
            raise DatasetError(f"{location}: expected a list of query and response, found {describe_value(pair)}")
        query, response = (check_text(location, text) for text in pair)
        turns += [Turn(Role.USER, query), Turn(Role.ASSISTANT, response)]
    turns.append(Turn(Role.USER, get_text(row, "query")))
    return RowTurns(turns, tuple(_parse_completion(row, name) for name in completion_columns))


def _read_plain_text(row: Row, completion_columns: Columns) -> RowText:
    return RowText(get_text(row, "prompt"), tuple(get_text(row, name) for name in completion_columns))


def _parse_system_prompt(row: Row) -> list[Turn]:
    """Return the `system` column as a list of one system turn, or an empty list if the column is missing."""
    return [Turn(Role.SYSTEM, get_text(row, "system"))] if row.columns.get("system") else []


def _add_system_prompt(row: Row, turns: list[Turn]) -> list[Turn]:
    """Insert the `system` column before the turns. Raises: DatasetError if they begin with another system prompt."""
    system_turns = _parse_system_prompt(row)
    if not system_turns or turns[0].role is not Role.SYSTEM:
        return [*system_turns, *turns]
    if turns[0].content != system_turns[0].content:
        raise DatasetError(
            f"{row.origin}: expected one system prompt, found different ones in the column system and in the messages"
        )
    return turns


def _parse_completion(row: Row, name: str) -> list[Turn]:
    """Return the text of a column as a list of one assistant turn."""
    return [Turn(Role.ASSISTANT, get_text(row, name))]


# Formats in order of precedence: the first matching format is used.
SFT_FORMATS = (
    ColumnFormat((), ("messages",), _read_messages),
    ColumnFormat((), ("conversations",), _read_sharegpt),
    ColumnFormat(("instruction",), ("output",), _read_alpaca),
    ColumnFormat(("prompt",), ("completion",), _read_plain_text),
    ColumnFormat(("query",), ("response",), _read_query),
)
DPO_FORMATS = (
    ColumnFormat((), ("messages", "rejected_messages"), _read_messages),
    ColumnFormat((), ("messages", "rejected_response"), _read_rejected_response),
    ColumnFormat((), ("chosen", "rejected"), _read_message_lists, requires_lists=True),
    ColumnFormat(("conversations",), ("chosen", "rejected"), _read_sharegpt_completions),
    ColumnFormat(("instruction",), ("chosen", "rejected"), _read_alpaca),
    ColumnFormat(("query",), ("chosen", "rejected"), _read_query),
    ColumnFormat(("query",), ("response", "rejected_response"), _read_query),
    ColumnFormat(("prompt",), ("chosen", "rejected"), _read_plain_text),
)
