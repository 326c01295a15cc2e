"""Finds the prompt tokens that both sequences of a preference pair share, so that they are computed once.

The rejected sequence then consists of the tokens after the shared ones, and attends to them (decisions/534).
"""

from collections.abc import Collection, Sequence

import torch

from finetune_trainer.data.token_dataset import IGNORE_INDEX, TOKEN_FEATURES, Features

# Shared tokens per computed token, from which on the savings exceed the memory for a second copy of keys and values.
_MIN_SHARED_SHARE = 1 / 8


def count_shared_tokens(
    pairs: Sequence[tuple[Features, ...]], visual_token_ids: Collection[int] = ()
) -> tuple[int, ...]:
    """Return the number of tokens that each rejected sequence shares with its chosen one; () if they are too few.

    Shared tokens precede the first target of both sequences, without its predecessor, so that every target is predicted
    from a token of its own sequence. pairs: chosen and rejected sequence.
    """
    shared = tuple(_count_in_pair(chosen, rejected, visual_token_ids) for chosen, rejected in pairs)
    total = sum(len(sequence["input_ids"]) for pair in pairs for sequence in pair)
    return shared if sum(shared) >= _MIN_SHARED_SHARE * (total - sum(shared)) else ()


def _count_in_pair(chosen: Features, rejected: Features, visual_token_ids: Collection[int]) -> int:
    media = [name for name in rejected if name not in TOKEN_FEATURES]
    if any(rejected[name] is not chosen.get(name) for name in media):
        return 0
    limit = min(_find_first_target(sequence) - 1 for sequence in (chosen, rejected))
    if limit < 1:
        return 0
    differences = (chosen["input_ids"][:limit] != rejected["input_ids"][:limit]).nonzero()[:, 0]
    count = int(differences[0]) if len(differences) else limit
    own_tokens = rejected["input_ids"][count:]
    has_own_media = bool(torch.isin(own_tokens, torch.tensor(list(visual_token_ids))).any()) if media else False
    return 0 if has_own_media else count


def _find_first_target(sequence: Features) -> int:
    """Return the position of the first target; 0 if there is none, as in fillers."""
    targets = (sequence["labels"] != IGNORE_INDEX).nonzero()[:, 0]
    return int(targets[0]) if len(targets) else 0
