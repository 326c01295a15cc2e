"""Parses rows into preferences: prompts with a chosen and a rejected completion."""

from dataclasses import dataclass, replace

from finetune_trainer.data_sources.column_formats import DPO_FORMATS, RowText, find_format
from finetune_trainer.data_sources.conversations import (
    Conversation,
    Example,
    PromptCompletion,
    build_conversation,
    check_plain_text_columns,
)
from finetune_trainer.data_sources.messages import Role, Turn, attach_media
from finetune_trainer.data_sources.readers import Row
from finetune_trainer.errors import DatasetError


@dataclass(frozen=True)
class Preference:
    """Prompt with a chosen and a rejected completion; assistant turns after the prompt are the targets."""

    origin: str
    chosen: Example
    rejected: Example


def parse_preference(row: Row) -> Preference:
    """Parse a row with the first DPO column format that matches it.

    Raises: DatasetError with row, expected and found value.
    """
    column_format = find_format(row, DPO_FORMATS)
    if column_format is None:
        raise DatasetError(_explain_missing_columns(row))
    content = column_format.read(row)
    if isinstance(content, RowText):
        return _build_text_preference(row, content)
    chosen, rejected = content.conversations
    return _build_preference(row, chosen, rejected)


def _explain_missing_columns(row: Row) -> str:
    """Return the error message for a row that matches no column format."""
    if "chosen" in row.columns and "rejected" in row.columns:
        return f"{row.origin}: expected a column prompt beside chosen and rejected; found none"
    found = ", ".join(map(str, row.columns)) or "none"
    return f"{row.origin}: dpo needs columns chosen and rejected, or messages and rejected_response; found {found}"


def _build_text_preference(row: Row, text: RowText) -> Preference:
    check_plain_text_columns(row)
    chosen, rejected = text.completions
    for name, completion in (("chosen", chosen), ("rejected", rejected)):
        if not completion.strip():
            raise DatasetError(f"{row.origin}, column {name}: expected a non-empty completion, found none")
    return Preference(
        row.origin,
        PromptCompletion(row.origin, text.prompt, chosen),
        PromptCompletion(row.origin, text.prompt, rejected),
    )


def _build_preference(row: Row, chosen: list[Turn], rejected: list[Turn]) -> Preference:
    """Build a preference from two conversations, whose common prefix is the prompt.

    If the conversations are identical, the row has no target tokens and is dropped later.
    """
    prompt_length = 0
    while prompt_length < min(len(chosen), len(rejected)) and chosen[prompt_length] == rejected[prompt_length]:
        prompt_length += 1
    for name, turns in (("chosen", chosen), ("rejected", rejected)):
        completion = [turn for turn in turns[prompt_length:] if turn.role is Role.ASSISTANT]
        has_assistant_turn = any(turn.role is Role.ASSISTANT for turn in turns)
        if not has_assistant_turn or any(turn.is_empty for turn in completion):
            raise DatasetError(f"{row.origin}, {name}: expected a non-empty assistant turn, found none")
        if partial := [turn.weight for turn in completion if turn.weight not in (0, 1)]:
            raise DatasetError(
                f"{row.origin}, {name}: expected weight 0 or 1, because dpo compares whole completions; found"
                f" {partial[0]}"
            )
    return Preference(
        row.origin,
        _build_completion(row, chosen, prompt_length),
        _build_completion(row, rejected, prompt_length),
    )


def _build_completion(row: Row, turns: list[Turn], prompt_length: int) -> Conversation:
    """Build a conversation in which only turns after the prompt are targets."""
    turns = attach_media(row, turns)
    prompt = (replace(turn, weight=0.0) for turn in turns[:prompt_length])
    return build_conversation(row, (*prompt, *turns[prompt_length:]))
