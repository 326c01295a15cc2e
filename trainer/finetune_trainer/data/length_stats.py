"""Formats log lines with histograms of row lengths and the longest rows."""

from collections.abc import Collection, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from finetune_trainer.data.epoch_order import Item, ItemOrder
from finetune_trainer.data.token_dataset import FILLER, TokenDataset

_MAX_BINS = 8
_BAR_WIDTH = 40  # length of the longest bar in characters
_MAX_LISTED_ROWS = 10


def describe_lengths(data: TokenDataset) -> Iterator[str]:
    """Yield log lines with a histogram of row lengths and the longest rows."""
    yield from _describe_distribution("lengths", data.lengths)
    yield f"longest: {', '.join(format_rows(data, find_longest_rows(data, _MAX_LISTED_ROWS)))}"


def describe_visual_tokens(data: TokenDataset, visual_token_ids: Collection[int]) -> Iterator[str]:
    """Yield log lines with a histogram of the number of image and video tokens per multimodal row."""
    counts = data.count_token_ids(visual_token_ids)
    multimodal = counts[counts > 0]
    if not len(multimodal):
        return
    yield from _describe_distribution(f"visual tokens of {len(multimodal)} rows", multimodal)
    _, first_copies = np.unique(data.origin_ids, return_index=True)
    most_first = first_copies[np.argsort(-counts[first_copies], kind="stable")[:_MAX_LISTED_ROWS]]
    descriptions = [f"{data.get_origin(int(row))} ({counts[row]})" for row in most_first if counts[row]]
    yield f"most visual tokens: {', '.join(descriptions)}"


def _describe_distribution(title: str, token_counts: NDArray[np.int64]) -> Iterator[str]:
    """Yield log lines with range, median and histogram of token counts."""
    yield f"{title}: {token_counts.min()} to {token_counts.max()} tokens, median {int(np.median(token_counts))}"
    bin_ends = _choose_bin_bounds(int(token_counts.min()), int(token_counts.max()))
    counts = np.bincount(np.searchsorted(bin_ends, token_counts), minlength=len(bin_ends)).tolist()
    end_width, count_width = len(str(bin_ends[-1])), len(str(max(counts)))
    for end, count in zip(bin_ends, counts, strict=True):
        bar = "#" * -(-count * _BAR_WIDTH // max(counts))
        yield f"  up to {end:>{end_width}} tokens  {count:>{count_width}} rows  {bar}".rstrip()


def find_longest_rows(data: TokenDataset, count: int) -> list[int]:
    """Return the indices of the `count` longest distinct rows, longest first."""
    _, first_copies = np.unique(data.origin_ids, return_index=True)
    lengths = data.lengths[first_copies]
    return [int(row) for row in first_copies[np.argsort(-lengths, kind="stable")[:count]]]


def select_costliest_items(order: ItemOrder, count: int) -> list[Item]:
    """Return the `count` longest items, or all items and fillers; no micro-batch of this size needs more compute."""
    epoch = order.get_epoch(0)
    items = [epoch.items[index] for index in np.argsort(-epoch.lengths, kind="stable")[:count].tolist()]
    return items + [FILLER] * (count - len(items))


def select_cheapest_item(order: ItemOrder) -> Item:
    """Return the item with the fewest tokens."""
    epoch = order.get_epoch(0)
    return epoch.items[int(np.argmin(epoch.lengths))]


def format_rows(data: TokenDataset, items: Sequence[Item]) -> list[str]:
    """Return log text with origin and length of each row, or token count and longest row of each pack."""
    lengths = data.lengths
    formatted = []
    for item in items:
        if isinstance(item, tuple):
            row = max(item, key=lambda member: int(lengths[member]))
            formatted.append(f"a pack of {lengths[list(item)].sum()} with {data.get_origin(row)} ({lengths[row]})")
        elif item != FILLER:
            formatted.append(f"{data.get_origin(item)} ({lengths[item]})")
    return formatted


def _choose_bin_bounds(min_count: int, max_count: int) -> list[int]:
    """Return the upper bounds of at most `_MAX_BINS` bins: ascending powers of two up to at least `max_count`."""
    first, last = (min_count - 1).bit_length(), (max_count - 1).bit_length()
    return [1 << power for power in range(max(first, last - _MAX_BINS + 1), last + 1)]
