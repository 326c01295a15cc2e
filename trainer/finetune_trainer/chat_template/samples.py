"""Tokenized sequences with loss weights, and their computation from rendered text."""

import itertools
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace

from transformers import PreTrainedTokenizerBase

from finetune_trainer.data_sources.media import MediaItem

# Note about a row of plain text.
SPANNING_TOKEN = "a token with the end of the prompt and the beginning of the completion is a target"  # noqa: S105

Span = tuple[int, int]  # (start, end) of characters or tokens; the end is exclusive


@dataclass(frozen=True)
class PlaceholderRange:
    """Token range of the placeholders of an image or video."""

    item: MediaItem
    start: int
    end: int


@dataclass(frozen=True)
class Sample:
    """Tokenized sequence with one loss weight per token; tokens with weight 0 are not targets."""

    origin: str
    input_ids: Sequence[int]
    weights: Sequence[float]
    placeholders: tuple[PlaceholderRange, ...] = ()
    notes: tuple[str, ...] = ()  # about ignored parts of the row and special cases, without the origin

    def truncate(self, max_length: int) -> "Sample":
        """Keep the first `max_length` tokens, or fewer if the cut would split the placeholders of an image."""
        split_at = (span.start for span in self.placeholders if span.start < max_length < span.end)
        end = min([max_length, *split_at])
        placeholders = tuple(span for span in self.placeholders if span.end <= end)
        return replace(self, input_ids=self.input_ids[:end], weights=self.weights[:end], placeholders=placeholders)


@dataclass(frozen=True)
class WeightedText:
    """Text with the character ranges of its targets, their loss weights, and the ranges of its placeholders."""

    text: str
    spans: Sequence[Span]
    weights: Sequence[float]
    media: Sequence[tuple[MediaItem, Span]] = ()


def tokenize_text(tokenizer: PreTrainedTokenizerBase, origin: str, content: WeightedText) -> Sample:
    """Tokenize the text and assign the weight of each range to the tokens inside it."""
    encoded = tokenizer(content.text, add_special_tokens=False, return_offsets_mapping=True)
    token_weights = [0.0] * len(encoded["offset_mapping"])
    # ascending, although a token that the tokenizer appends has the range (0, 0)
    token_starts = list(itertools.accumulate((start for start, _ in encoded["offset_mapping"]), max))
    for span, weight in zip(content.spans, content.weights, strict=True):
        extended = _extend_over_whitespace(content.text, span)
        for index in range(bisect_left(token_starts, extended[0]), bisect_left(token_starts, span[1])):
            if _is_inside(encoded["offset_mapping"][index], span, extended):
                token_weights[index] = token_weights[index] or weight
    placeholders = tuple(
        PlaceholderRange(item, *_find_token_range(encoded["offset_mapping"], span)) for item, span in content.media
    )
    return Sample(origin, encoded["input_ids"], clear_first_weight(token_weights), placeholders)


def clear_first_weight(weights: list[float]) -> list[float]:
    """Return the weights with the first set to 0, because no earlier token predicts the first token."""
    return [0.0, *weights[1:]]


def _extend_over_whitespace(text: str, span: Span) -> Span:
    """Extend the span to include adjacent whitespace, because a token may contain whitespace of the template."""
    start, end = span
    return len(text[:start].rstrip()), len(text) - len(text[end:].lstrip())


def _is_inside(token_span: Span, span: Span, extended_span: Span) -> bool:
    """Return whether the token overlaps the span and lies within the extended span."""
    return (
        token_span[1] > span[0]
        and token_span[0] < span[1]
        and token_span[0] >= extended_span[0]
        and token_span[1] <= extended_span[1]
    )


def _find_token_range(offsets: Sequence[Span], span: Span) -> Span:
    """Return the range of tokens that overlap the character span."""
    indices = [index for index, (start, end) in enumerate(offsets) if start < span[1] and end > span[0]]
    return indices[0], indices[-1] + 1
