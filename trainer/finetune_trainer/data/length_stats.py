"""How long the rows are, for the log: a histogram, and the longest by name."""

from collections.abc import Collection, Iterator, Sequence

import numpy as np

from finetune_trainer.data.epoch_order import Item, Order
from finetune_trainer.data.token_dataset import FILLER, Numbers, TokenDataset

_LINES = 8  # of the histogram
_BAR = 40  # characters of its longest bar
_NAMED = 10


def describe_lengths(data: TokenDataset) -> Iterator[str]:
    """Lines of a log."""
    yield from _describe("lengths", data.lengths)
    yield f"longest: {', '.join(name_rows(data, longest(data, _NAMED)))}"


def describe_shown(data: TokenDataset, visual: Collection[int]) -> Iterator[str]:
    """How many tokens of the rows that show something are of images and videos: those that are in `visual`."""
    counts = data.count(visual)
    shown = counts[counts > 0]
    if not len(shown):
        return
    yield from _describe(f"visual tokens of {len(shown)} rows", shown)
    _, firsts = np.unique(data.origins, return_index=True)
    most = [int(row) for row in firsts[np.argsort(-counts[firsts], kind="stable")[:_NAMED]] if counts[row]]
    yield f"most visual tokens: {', '.join(f'{data.place(row)} ({counts[row]})' for row in most)}"


def _describe(what: str, numbers: Numbers) -> Iterator[str]:
    """Range, median and histogram."""
    yield f"{what}: {numbers.min()} to {numbers.max()} tokens, median {int(np.median(numbers))}"
    ends = _ends(int(numbers.min()), int(numbers.max()))
    counts = np.bincount(np.searchsorted(ends, numbers), minlength=len(ends)).tolist()
    for end, count in zip(ends, counts, strict=True):
        bar = "#" * -(-count * _BAR // max(counts))
        yield f"  up to {end:>{len(str(ends[-1]))}} tokens  {count:>{len(str(max(counts)))}} rows  {bar}".rstrip()


def longest(data: TokenDataset, count: int) -> list[int]:
    """The longest rows, longest first; of copies the first."""
    _, firsts = np.unique(data.origins, return_index=True)
    lengths = data.lengths[firsts]
    return [int(row) for row in firsts[np.argsort(-lengths, kind="stable")[:count]]]


def costliest(order: Order, count: int) -> list[Item]:
    """What the costliest micro-batch that can be would hold, in whatever epoch; fillers if there is less."""
    epoch = order.epoch(0)
    items = [epoch.items[index] for index in np.argsort(-epoch.lengths, kind="stable")[:count].tolist()]
    return items + [FILLER] * (count - len(items))


def name_rows(data: TokenDataset, items: Sequence[Item]) -> list[str]:
    """Each row with its place and length; a pack with its tokens and its longest row."""
    lengths = data.lengths
    named = []
    for item in items:
        if isinstance(item, tuple):
            row = max(item, key=lambda member: int(lengths[member]))
            named.append(f"a pack of {lengths[list(item)].sum()} with {data.place(row)} ({lengths[row]})")
        elif item != FILLER:
            named.append(f"{data.place(item)} ({lengths[item]})")
    return named


def _ends(least: int, most: int) -> list[int]:
    """Powers of two from the first that is not less than `least` to that for `most`, the last few of them."""
    first, last = (least - 1).bit_length(), (most - 1).bit_length()
    return [1 << power for power in range(max(first, last - _LINES + 1), last + 1)]
