"""Parses rows into conversations or plain-text prompts and completions."""

from dataclasses import dataclass

from finetune_trainer.data_sources.column_formats import SFT_FORMATS, RowText, find_format
from finetune_trainer.data_sources.media import Modality, parse_media_columns
from finetune_trainer.data_sources.messages import Role, Turn, attach_media
from finetune_trainer.data_sources.readers import Row
from finetune_trainer.errors import DatasetError


@dataclass(frozen=True)
class Conversation:
    """Turns to render with the chat template; assistant turns are the targets."""

    origin: str
    turns: tuple[Turn, ...]


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
    return _build_conversation(row, turns)


def _build_conversation(row: Row, turns: list[Turn]) -> Conversation:
    turns = attach_media(row, turns)
    for index, turn in enumerate(turns):
        if turn.role is Role.ASSISTANT and not turn.content.strip():
            raise DatasetError(f"{row.origin}: turn {index} (assistant) is empty; expected text to learn")
    if not any(turn.role is Role.ASSISTANT for turn in turns):
        raise DatasetError(f"{row.origin}: expected at least one assistant turn, found none; there is nothing to learn")
    return Conversation(row.origin, tuple(turns))


def _build_prompt_completion(row: Row, text: RowText, *, column: str) -> PromptCompletion:
    for modality in Modality:
        if parse_media_columns(row, modality):
            raise DatasetError(
                f"{row.origin}: a row with prompt and completion cannot have {modality}s; write the row as messages"
            )
    (completion,) = text.completions
    if not completion:
        raise DatasetError(f"{row.origin}, column {column}: expected text to learn, found none")
    return PromptCompletion(row.origin, text.prompt, completion)
