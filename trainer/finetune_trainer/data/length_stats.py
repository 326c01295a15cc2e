"""Statistics of row lengths for the log: histograms, and the origins of the longest rows."""

from collections.abc import Collection, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from finetune_trainer.data.epoch_order import Item, Order
from finetune_trainer.data.token_dataset import FILLER, TokenDataset

_MAX_BINS = 8
_BAR_WIDTH = 40  # characters of the longest bar
_MAX_LISTED_ROWS = 10


def describe_lengths(data: TokenDataset) -> Iterator[str]:
    """Yield log lines with a histogram of row lengths and the longest rows."""
    yield from _describe_distribution("lengths", data.lengths)
    yield f"longest: {', '.join(format_rows(data, find_longest_rows(data, _MAX_LISTED_ROWS)))}"


def describe_visual_tokens(data: TokenDataset, visual_token_ids: Collection[int]) -> Iterator[str]:
    """Yield log lines on the number of visual tokens (of images and videos) in the multimodal rows."""
    counts = data.max_count_of(visual_token_ids)
    multimodal = counts[counts > 0]
    if not len(multimodal):
        return
    yield from _describe_distribution(f"visual tokens of {len(multimodal)} rows", multimodal)
    _, first_copies = np.unique(data.origin_ids, return_index=True)
    most_first = first_copies[np.argsort(-counts[first_copies], kind="stable")[:_MAX_LISTED_ROWS]]
    listed = [f"{data.origin(int(row))} ({counts[row]})" for row in most_first if counts[row]]
    yield f"most visual tokens: {', '.join(listed)}"


def _describe_distribution(title: str, numbers: NDArray[np.int64]) -> Iterator[str]:
    """Yield range, median and histogram of token counts."""
    yield f"{title}: {numbers.min()} to {numbers.max()} tokens, median {int(np.median(numbers))}"
    bin_ends = _choose_bin_ends(int(numbers.min()), int(numbers.max()))
    counts = np.bincount(np.searchsorted(bin_ends, numbers), minlength=len(bin_ends)).tolist()
    end_width, count_width = len(str(bin_ends[-1])), len(str(max(counts)))
    for end, count in zip(bin_ends, counts, strict=True):
        bar = "#" * -(-count * _BAR_WIDTH // max(counts))
        yield f"  up to {end:>{end_width}} tokens  {count:>{count_width}} rows  {bar}".rstrip()


def find_longest_rows(data: TokenDataset, count: int) -> list[int]:
    """Return the indices of the `count` longest rows, longest first; of copies of a row only the first."""
    _, first_copies = np.unique(data.origin_ids, return_index=True)
    lengths = data.lengths[first_copies]
    return [int(row) for row in first_copies[np.argsort(-lengths, kind="stable")[:count]]]


def select_costliest_items(order: Order, count: int) -> list[Item]:
    """Return the `count` longest items, an upper bound on the cost of any micro-batch; completed with fillers."""
    epoch = order.epoch(0)
    items = [epoch.items[index] for index in np.argsort(-epoch.lengths, kind="stable")[:count].tolist()]
    return items + [FILLER] * (count - len(items))


def format_rows(data: TokenDataset, items: Sequence[Item]) -> list[str]:
    """Return each row as origin and length, and each pack as its number of tokens and its longest row."""
    lengths = data.lengths
    formatted = []
    for item in items:
        if isinstance(item, tuple):
            row = max(item, key=lambda member: int(lengths[member]))
            formatted.append(f"a pack of {lengths[list(item)].sum()} with {data.origin(row)} ({lengths[row]})")
        elif item != FILLER:
            formatted.append(f"{data.origin(item)} ({lengths[item]})")
    return formatted


def _choose_bin_ends(smallest: int, largest: int) -> list[int]:
    """Return ascending powers of two; the last is at least `largest`, the first covers `smallest` if bins suffice."""
    first, last = (smallest - 1).bit_length(), (largest - 1).bit_length()
    return [1 << power for power in range(max(first, last - _MAX_BINS + 1), last + 1)]
