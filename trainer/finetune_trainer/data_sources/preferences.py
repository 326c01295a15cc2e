"""Parses a row into a preference: a prompt with a chosen and a rejected completion."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from finetune_trainer.data_sources.conversations import (
    Conversation,
    Example,
    PromptCompletion,
    Role,
    Turn,
    attach_media,
    get_text,
    parse_alpaca_prompt,
    parse_messages,
    parse_query_prompt,
    parse_sharegpt,
    parse_sharegpt_turn,
)
from finetune_trainer.data_sources.readers import Row
from finetune_trainer.errors import DatasetError


@dataclass(frozen=True)
class Preference:
    """A prompt with a chosen and a rejected completion; the loss covers the assistant turns after the prompt."""

    origin: str
    chosen: Example
    rejected: Example


def parse_preference(row: Row) -> Preference:
    """Parse a row in the column format whose columns it has.

    Raises: DatasetError naming the row, the expected and the found value.
    """
    columns = row.columns
    if "messages" in columns and ("rejected_response" in columns or "rejected_messages" in columns):
        return _parse_messages_and_rejected(row)
    if "chosen" not in columns or "rejected" not in columns:
        if "query" in columns and "response" in columns and "rejected_response" in columns:
            return _parse_pair(row, parse_query_prompt(row), "response", "rejected_response")
        found = ", ".join(map(str, columns)) or "none"
        raise DatasetError(
            f"{row.origin}: dpo needs columns chosen and rejected, or messages and rejected_response; found {found}"
        )
    if isinstance(columns["chosen"], list) and isinstance(columns["rejected"], list):
        return _parse_two_conversations(row)
    if "conversations" in columns:
        return _parse_sharegpt_preference(row)
    if "instruction" in columns:
        return _parse_pair(row, parse_alpaca_prompt(row), "chosen", "rejected")
    if "query" in columns:
        return _parse_pair(row, parse_query_prompt(row), "chosen", "rejected")
    return _parse_plain_text(row)


def _parse_plain_text(row: Row) -> Preference:
    """Parse prompt, chosen and rejected as plain text without a chat template."""
    if "prompt" not in row.columns:
        raise DatasetError(f"{row.origin}: expected a column prompt beside chosen and rejected; found none")
    prompt, chosen, rejected = (get_text(row, name) for name in ("prompt", "chosen", "rejected"))
    for name, text in (("chosen", chosen), ("rejected", rejected)):
        if not text.strip():
            raise DatasetError(f"{row.origin}, column {name}: expected a non-empty completion, found none")
    return Preference(
        row.origin,
        PromptCompletion(row.origin, prompt, chosen),
        PromptCompletion(row.origin, prompt, rejected),
    )


def _parse_two_conversations(row: Row) -> Preference:
    """Parse chosen and rejected as whole conversations, or as completions of a prompt of messages or text."""
    chosen, rejected = parse_messages(row, "chosen"), parse_messages(row, "rejected")
    prompt: list[Turn] = []
    if isinstance(row.columns.get("prompt"), list):
        prompt = parse_messages(row, "prompt")
    elif isinstance(row.columns.get("prompt"), str) and chosen[0].role is Role.ASSISTANT:
        prompt = [Turn(Role.USER, get_text(row, "prompt"))]
    return _build_preference(row, [*prompt, *chosen], [*prompt, *rejected])


def _parse_sharegpt_preference(row: Row) -> Preference:
    prompt = parse_sharegpt(row, "conversations")
    chosen, rejected = (
        parse_sharegpt_turn(f"{row.origin}, column {name}", row.columns[name]) for name in ("chosen", "rejected")
    )
    return _build_preference(row, [*prompt, chosen], [*prompt, rejected])


def _parse_messages_and_rejected(row: Row) -> Preference:
    """Parse messages as the chosen conversation; the rejected one is a whole conversation or another last turn."""
    chosen = parse_messages(row, "messages")
    if "rejected_messages" in row.columns:
        return _build_preference(row, chosen, parse_messages(row, "rejected_messages"))
    if chosen[-1].role is not Role.ASSISTANT:
        raise DatasetError(
            f"{row.origin}, column messages: expected an assistant turn at the end, which rejected_response replaces;"
            f" found a {chosen[-1].role} turn"
        )
    rejected = Turn(Role.ASSISTANT, get_text(row, "rejected_response"))
    return _build_preference(row, chosen, [*chosen[:-1], rejected])


def _parse_pair(row: Row, prompt: Sequence[Turn], chosen_column: str, rejected_column: str) -> Preference:
    """Parse a prompt and two columns with the text of the chosen and the rejected completion."""
    chosen, rejected = (Turn(Role.ASSISTANT, get_text(row, name)) for name in (chosen_column, rejected_column))
    return _build_preference(row, [*prompt, chosen], [*prompt, rejected])


def _build_preference(row: Row, chosen: Sequence[Turn], rejected: Sequence[Turn]) -> Preference:
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
        _build_conversation(row, chosen, prompt_turns),
        _build_conversation(row, rejected, prompt_turns),
    )


def _build_conversation(row: Row, turns: Sequence[Turn], prompt_turns: int) -> Conversation:
    turns = attach_media(row, list(turns))
    prompt = (replace(turn, weight=0.0) for turn in turns[:prompt_turns])
    return Conversation(row.origin, (*prompt, *turns[prompt_turns:]))
