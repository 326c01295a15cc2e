"""Several rows in one sequence; their positions begin anew, by which transformers keeps them apart."""

import torch
from torch.utils.data import Dataset

from finetune_trainer.data.order import Item
from finetune_trainer.data.tokens import Features, TokenDataset

POSITIONS = "position_ids"


class PackedDataset(Dataset[tuple[Features, ...]]):
    """Rows that belong together, by their indices. The first token of a row is never learned, so no row predicts
    the next one's."""

    def __init__(self, rows: TokenDataset) -> None:
        self._rows = rows

    def __getitem__(self, pack: Item) -> tuple[Features, ...]:
        members = [self._rows[row][0] for row in ([pack] if isinstance(pack, int) else pack)]
        packed = {name: torch.cat([member[name] for member in members]) for name in members[0]}
        positions = torch.cat([torch.arange(len(member["input_ids"])) for member in members])
        return ({**packed, POSITIONS: positions},)
