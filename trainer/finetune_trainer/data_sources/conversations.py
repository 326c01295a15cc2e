"""Parses rows into conversations or plain-text prompts and completions."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from finetune_trainer.data_sources.column_formats import SFT_FORMATS, RowText, find_format
from finetune_trainer.data_sources.media import Modality, parse_media_columns
from finetune_trainer.data_sources.message_keys import describe_ignored_columns, has_value
from finetune_trainer.data_sources.messages import Role, Turn, attach_media
from finetune_trainer.data_sources.readers import Row
from finetune_trainer.data_sources.tool_calls import JsonObject, parse_template_kwargs, parse_tools
from finetune_trainer.errors import DatasetError


@dataclass(frozen=True)
class Conversation:
    """Turns to render with the chat template; assistant turns are the targets."""

    origin: str
    turns: tuple[Turn, ...]
    tools: tuple[JsonObject, ...] = ()
    template_kwargs: JsonObject = field(default_factory=dict)
    notes: tuple[str, ...] = ()  # about parts of the row that are ignored, without the origin


@dataclass(frozen=True)
class PromptCompletion:
    """Prompt and completion as plain text without a chat template; the completion is the target."""

    origin: str
    prompt: str
    completion: str


Example = Conversation | PromptCompletion


def parse_example(row: Row) -> Example:
    """Parse a row with the first SFT column format that matches it.

    Raises: DatasetError with row, column, expected and found value.
    """
    column_format = find_format(row, SFT_FORMATS)
    if column_format is None:
        expected = "; ".join(" + ".join(sft_format.columns) for sft_format in SFT_FORMATS)
        found = ", ".join(map(str, row.columns)) or "none"
        raise DatasetError(f"{row.origin}: expected columns {expected}; found {found}")
    content = column_format.read(row)
    if isinstance(content, RowText):
        return _build_prompt_completion(row, content, column=column_format.completion_columns[0])
    (turns,) = content.conversations
    return _build_sft_conversation(row, turns)


def build_conversation(row: Row, turns: Sequence[Turn]) -> Conversation:
    """Build a conversation of turns that contain their media, with the tools of the row.

    Raises: DatasetError if the tools or another column cannot be used.
    """
    keys = dict.fromkeys(key for turn in turns for key in turn.ignored_keys)
    return Conversation(
        row.origin,
        tuple(turns),
        parse_tools(row),
        parse_template_kwargs(row),
        (*(f'message key "{key}" is ignored' for key in keys), *describe_ignored_columns(row)),
    )


def check_plain_text_columns(row: Row) -> None:
    """Raise DatasetError if a row of plain text has columns that need a chat template."""
    for name in ("tools", "chat_template_kwargs"):
        if has_value(row.columns.get(name)):
            raise DatasetError(
                f"{row.origin}, column {name}: a row of plain text is not rendered with a chat template; write the row"
                " as messages"
            )


def _build_sft_conversation(row: Row, turns: list[Turn]) -> Conversation:
    turns = attach_media(row, turns)
    for index, turn in enumerate(turns):
        if turn.role is Role.ASSISTANT and turn.is_empty:
            raise DatasetError(f"{row.origin}: turn {index} (assistant) is empty; expected text to learn")
    if not any(turn.role is Role.ASSISTANT for turn in turns):
        raise DatasetError(f"{row.origin}: expected at least one assistant turn, found none; there is nothing to learn")
    return build_conversation(row, turns)


def _build_prompt_completion(row: Row, text: RowText, *, column: str) -> PromptCompletion:
    for modality in Modality:
        if parse_media_columns(row, modality):
            raise DatasetError(
                f"{row.origin}: a row with prompt and completion cannot have {modality}s; write the row as messages"
            )
    check_plain_text_columns(row)
    (completion,) = text.completions
    if not completion:
        raise DatasetError(f"{row.origin}, column {column}: expected text to learn, found none")
    return PromptCompletion(row.origin, text.prompt, completion)
