"""Several rows in one sequence; their positions begin anew, by which transformers keeps them apart."""

from collections.abc import Callable

import torch
from torch.utils.data import Dataset

from finetune_trainer.data.epoch_order import Item
from finetune_trainer.data.token_dataset import Features

POSITIONS = "position_ids"
AXES = "axes"  # positions in time, height and width, of models whose images have some

Axes = Callable[[Features], torch.Tensor]  # of a row: (tokens, 3)


class PackedDataset(Dataset[tuple[Features, ...]]):
    """Rows that belong together, by their indices. The first token of a row is never learned, so no row predicts
    the next one's. What rows show is in the order of the rows."""

    def __init__(self, rows: Dataset[tuple[Features, ...]], axes: Axes | None = None) -> None:
        self._rows = rows
        self._axes = axes

    def __getitem__(self, pack: Item) -> tuple[Features, ...]:
        members = [self._rows[row][0] for row in ([pack] if isinstance(pack, int) else pack)]
        names = dict.fromkeys(name for member in members for name in member)
        packed = {name: torch.cat([member[name] for member in members if name in member]) for name in names}
        packed[POSITIONS] = torch.cat([torch.arange(len(member["input_ids"])) for member in members])
        if self._axes:
            packed[AXES] = torch.cat([self._axes(member) for member in members])
        return (packed,)
