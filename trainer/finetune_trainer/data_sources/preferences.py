"""What a row of preferences means: one prompt with an answer that was chosen and one that was rejected."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from finetune_trainer.data_sources.conversations import (
    Completion,
    Conversation,
    Example,
    Role,
    Turn,
    alpaca_prompt,
    messages_in,
    query_prompt,
    sharegpt_in,
    sharegpt_turn,
    text_in,
    with_pictures,
)
from finetune_trainer.data_sources.readers import Row
from finetune_trainer.errors import DatasetError


@dataclass(frozen=True)
class Preference:
    """Two continuations of one prompt; only the assistant's words after the prompt are learned."""

    place: str
    chosen: Example
    rejected: Example


def parse_preference(row: Row) -> Preference:
    """By the columns it has; raises DatasetError naming the place, what was expected and what was found."""
    columns = row.columns
    if "messages" in columns and ("rejected_response" in columns or "rejected_messages" in columns):
        return _rejected_beside_messages(row)
    if "chosen" not in columns or "rejected" not in columns:
        if "query" in columns and "response" in columns and "rejected_response" in columns:
            return _pair(row, query_prompt(row), "response", "rejected_response")
        found = ", ".join(map(str, columns)) or "none"
        raise DatasetError(
            f"{row.place}: dpo needs columns chosen and rejected, or messages and rejected_response; found {found}"
        )
    if isinstance(columns["chosen"], list) and isinstance(columns["rejected"], list):
        return _two_conversations(row)
    if "conversations" in columns:
        return _sharegpt(row)
    if "instruction" in columns:
        return _pair(row, alpaca_prompt(row), "chosen", "rejected")
    if "query" in columns:
        return _pair(row, query_prompt(row), "chosen", "rejected")
    return _plain_text(row)


def _plain_text(row: Row) -> Preference:
    """A prompt and two completions, without a template."""
    if "prompt" not in row.columns:
        raise DatasetError(f"{row.place}: expected a column prompt beside chosen and rejected; found none")
    prompt, chosen, rejected = (text_in(row, name) for name in ("prompt", "chosen", "rejected"))
    for name, text in (("chosen", chosen), ("rejected", rejected)):
        if not text.strip():
            raise DatasetError(f"{row.place}, column {name}: expected an answer with words, found none")
    return Preference(row.place, Completion(row.place, prompt, chosen), Completion(row.place, prompt, rejected))


def _two_conversations(row: Row) -> Preference:
    """Whole conversations, or the answers alone beside a prompt of messages or text."""
    chosen, rejected = messages_in(row, "chosen"), messages_in(row, "rejected")
    prompt: list[Turn] = []
    if isinstance(row.columns.get("prompt"), list):
        prompt = messages_in(row, "prompt")
    elif isinstance(row.columns.get("prompt"), str) and chosen[0].role is Role.ASSISTANT:
        prompt = [Turn(Role.USER, text_in(row, "prompt"))]
    return _preference(row, [*prompt, *chosen], [*prompt, *rejected])


def _sharegpt(row: Row) -> Preference:
    prompt = sharegpt_in(row, "conversations")
    answers = (sharegpt_turn(f"{row.place}, column {name}", row.columns[name]) for name in ("chosen", "rejected"))
    chosen, rejected = answers
    return _preference(row, [*prompt, chosen], [*prompt, rejected])


def _rejected_beside_messages(row: Row) -> Preference:
    """The conversation is the chosen one; the rejected one is given whole, or as another last answer."""
    chosen = messages_in(row, "messages")
    if "rejected_messages" in row.columns:
        return _preference(row, chosen, messages_in(row, "rejected_messages"))
    if chosen[-1].role is not Role.ASSISTANT:
        raise DatasetError(
            f"{row.place}, column messages: expected the assistant's answer at the end, which rejected_response"
            f" replaces; found a turn of {chosen[-1].role}"
        )
    return _preference(row, chosen, [*chosen[:-1], Turn(Role.ASSISTANT, text_in(row, "rejected_response"))])


def _pair(row: Row, prompt: Sequence[Turn], chosen: str, rejected: str) -> Preference:
    answers = (Turn(Role.ASSISTANT, text_in(row, name)) for name in (chosen, rejected))
    good, bad = answers
    return _preference(row, [*prompt, good], [*prompt, bad])


def _preference(row: Row, chosen: Sequence[Turn], rejected: Sequence[Turn]) -> Preference:
    """What both begin with is the prompt; two answers that are the same leave nothing to learn."""
    shared = 0
    while shared < min(len(chosen), len(rejected)) and chosen[shared] == rejected[shared]:
        shared += 1
    for name, turns in (("chosen", chosen), ("rejected", rejected)):
        answers = [turn for turn in turns[shared:] if turn.role is Role.ASSISTANT]
        if not any(turn.role is Role.ASSISTANT for turn in turns) or not all(turn.content.strip() for turn in answers):
            raise DatasetError(f"{row.place}, {name}: expected an answer of the assistant with words, found none")
    return Preference(row.place, _conversation(row, chosen, shared), _conversation(row, rejected, shared))


def _conversation(row: Row, turns: Sequence[Turn], shared: int) -> Conversation:
    turns = with_pictures(row, list(turns))
    return Conversation(row.place, (*(replace(turn, weight=0.0) for turn in turns[:shared]), *turns[shared:]))
