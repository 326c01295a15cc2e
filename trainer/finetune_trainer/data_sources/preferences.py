"""Parses a row into a preference: a prompt with a chosen and a rejected completion."""

from dataclasses import dataclass, replace

from finetune_trainer.data_sources.column_formats import DPO_FORMATS, RowText, find_format
from finetune_trainer.data_sources.conversations import Conversation, Example, PromptCompletion
from finetune_trainer.data_sources.messages import Role, Turn, attach_media
from finetune_trainer.data_sources.readers import Row
from finetune_trainer.errors import DatasetError


@dataclass(frozen=True)
class Preference:
    """A prompt with a chosen and a rejected completion; the loss covers the assistant turns after the prompt."""

    origin: str
    chosen: Example
    rejected: Example


def parse_preference(row: Row) -> Preference:
    """Parse a row in the first column format of DPO whose columns it has.

    Raises: DatasetError naming the row, the expected and the found value.
    """
    column_format = find_format(row, DPO_FORMATS)
    if column_format is None:
        raise DatasetError(_explain_columns(row))
    content = column_format.read(row)
    if isinstance(content, RowText):
        return _build_text_preference(row, content)
    chosen, rejected = content.conversations
    return _build_preference(row, chosen, rejected)


def _explain_columns(row: Row) -> str:
    """Return the error for a row that has the columns of no format."""
    if "chosen" in row.columns and "rejected" in row.columns:
        return f"{row.origin}: expected a column prompt beside chosen and rejected; found none"
    found = ", ".join(map(str, row.columns)) or "none"
    return f"{row.origin}: dpo needs columns chosen and rejected, or messages and rejected_response; found {found}"


def _build_text_preference(row: Row, text: RowText) -> Preference:
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
    """Build the preference of two conversations; the turns that both begin with are the prompt.

    Identical conversations are all prompt, so the row has no target token and is dropped later.
    """
    prompt_turns = 0
    while prompt_turns < min(len(chosen), len(rejected)) and chosen[prompt_turns] == rejected[prompt_turns]:
        prompt_turns += 1
    for name, turns in (("chosen", chosen), ("rejected", rejected)):
        completion = [turn for turn in turns[prompt_turns:] if turn.role is Role.ASSISTANT]
        has_assistant_turn = any(turn.role is Role.ASSISTANT for turn in turns)
        if not has_assistant_turn or not all(turn.content.strip() for turn in completion):
            raise DatasetError(f"{row.origin}, {name}: expected a non-empty assistant turn, found none")
    return Preference(
        row.origin,
        _build_completion(row, chosen, prompt_turns),
        _build_completion(row, rejected, prompt_turns),
    )


def _build_completion(row: Row, turns: list[Turn], prompt_turns: int) -> Conversation:
    """Return the conversation whose loss covers the turns after the prompt only."""
    turns = attach_media(row, turns)
    prompt = (replace(turn, weight=0.0) for turn in turns[:prompt_turns])
    return Conversation(row.origin, (*prompt, *turns[prompt_turns:]))
