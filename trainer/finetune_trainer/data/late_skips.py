"""Skips rows whose images or videos turn out to be unusable during training (decisions/536)."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from finetune_trainer.data.collator import Collate
from finetune_trainer.data.micro_batch import MicroBatch, SkippedRows
from finetune_trainer.data.token_dataset import FILLER, Features, MultimodalDataset, TokenDataset
from finetune_trainer.errors import DatasetError
from finetune_trainer.vision.processor import VisionProcessor


@dataclass
class LateSkips:
    """Rows that are skipped. What a loader process finds is unknown to others until its micro-batch is reported."""

    rows: SkippedRows = field(default_factory=dict)
    found: SkippedRows = field(default_factory=dict)  # by this process since its last micro-batch

    def report(self, micro_batch: MicroBatch) -> None:
        """Log the rows that were found while the micro-batch was loaded, and skip them from now on."""
        for (name, index), message in micro_batch.skipped_rows.items():
            if (name, index) not in self.rows:
                print(f"warning: {name}: a row is skipped from now on (dataset.onBadRow): {message}", flush=True)
        self.rows |= micro_batch.skipped_rows


class SkippingDataset(MultimodalDataset):
    """Puts a filler, which has no target tokens, in the place of a row whose images or videos cannot be used."""

    def __init__(self, rows: TokenDataset, vision: VisionProcessor, skips: LateSkips, name: str) -> None:
        super().__init__(rows, vision)
        self._skips = skips
        self._name = name

    def __getitem__(self, index: int) -> tuple[Features, ...]:
        if (self._name, index) not in self._skips.rows:
            try:
                return super().__getitem__(index)
            except DatasetError as error:
                self._skips.found[self._name, index] = str(error)
        return self._rows[FILLER]


def collate_with_skips(samples: Sequence[Any], *, collate: Collate, skips: LateSkips) -> MicroBatch:
    """Collate a micro-batch, and add the rows that were found while its samples were loaded."""
    found, skips.found = skips.found, {}
    return replace(collate(samples), skipped_rows=found)
