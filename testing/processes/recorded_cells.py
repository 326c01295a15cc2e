"""Run trainings as `cells` does, and record what an independent computation needs: `testing.reference` reads it.

Each rank writes `rows.RANK.json` to the folder of the cell: the rows of each micro-batch by step, with their numbers of
tokens and targets, and the rows of the evaluation. Rank 0 also writes the initial values of the adapter. The launcher
of the supervisor calls `prepare` once, and `main` in each rank. A file bugs.json in the folder of the cells names, for
some cells, a function of a test (`module:function`) that plants a bug before the training.
"""

import importlib
import json
import os
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch.utils.data import Dataset

from finetune_trainer.data.batch_sampler import RankDataLoader, build_dataloader
from finetune_trainer.data.collator import Collate
from finetune_trainer.data.epoch_order import Item
from finetune_trainer.data.micro_batch import MicroBatch
from finetune_trainer.data.token_dataset import FILLER, Features, TokenDataset
from finetune_trainer.distributed.rank_context import RankContext
from finetune_trainer.model import load
from finetune_trainer.training import base_trainer, evaluation
from finetune_trainer.training.base_trainer import GlobalMeanTrainer
from finetune_trainer.training.trainer_inputs import TrainerInputs
from testing.processes import cells

INITIAL_ADAPTER = "initial.safetensors"

RecordedBatch = dict[str, Any]  # rows (a list of origins per item), lengths, targets


class RowRecorder:
    """Records the rows of the micro-batches that the data loaders of one training return."""

    def __init__(self) -> None:
        self.items_per_epoch = 0
        self.steps: dict[int, list[RecordedBatch]] = {}
        self.evaluation: list[RecordedBatch] = []
        self._rows: TokenDataset | None = None
        self._batches: list[RecordedBatch] = []

    def get_train_dataloader(self, trainer: GlobalMeanTrainer) -> RankDataLoader:
        """Return the data loader of the trainer, whose micro-batches are recorded."""
        self.items_per_epoch, self._rows = len(trainer.inputs.data.order), trainer.inputs.data.train
        return GET_TRAIN_DATALOADER(trainer)

    def get_batch_samples(self, trainer: GlobalMeanTrainer, *arguments: Any) -> tuple[list[MicroBatch], torch.Tensor]:
        """Return the micro-batches of a step, and assign what was recorded of them to the step."""
        self._batches = []
        samples = GET_BATCH_SAMPLES(trainer, *arguments)
        self.steps[trainer.state.global_step + 1] = self._batches
        return samples

    def compute_evaluation_loss(self, inputs: TrainerInputs, *arguments: Any) -> float:
        """Return the loss of an evaluation, and record its rows."""
        rows, self._rows, self._batches = self._rows, inputs.data.eval, []
        loss = evaluation.compute_evaluation_loss(inputs, *arguments)
        self._rows, self.evaluation = rows, self._batches
        return loss

    def build_dataloader(
        self, dataset: Dataset[tuple[Features, ...]], sampler: Any, collate: Collate, **options: Any
    ) -> RankDataLoader:
        """Build a data loader that records the items of each micro-batch."""
        items: list[Item] = []

        class RecordedDataset(Dataset[tuple[Features, ...]]):
            def __getitem__(self, item: Item) -> tuple[Features, ...]:
                items.append(item)
                return dataset[item]

        def collate_and_record(samples: Sequence[Any]) -> MicroBatch:
            batch = collate(samples)
            rows = [self._list_origins(item) for item in items]
            self._batches.append({"rows": rows, "lengths": batch.lengths, "targets": batch.target_counts})
            items.clear()
            return batch

        return build_dataloader(RecordedDataset(), sampler, collate_and_record, **options)

    def _list_origins(self, item: Item) -> list[str]:
        assert self._rows is not None
        rows = (item,) if isinstance(item, int) else item
        return [self._rows.get_origin(row) for row in rows if row != FILLER]

    def write(self, file: Path) -> None:
        """Write the record as JSON."""
        content = {"itemsPerEpoch": self.items_per_epoch, "steps": self.steps, "evaluation": self.evaluation}
        file.write_text(json.dumps(content))


GET_TRAIN_DATALOADER = GlobalMeanTrainer.get_train_dataloader
GET_BATCH_SAMPLES = GlobalMeanTrainer.get_batch_samples
_LOAD: Any = load  # which does not export what it imports
ADD_ADAPTERS = _LOAD.add_adapters
TRAIN_CELL = cells.train_cell


@contextmanager
def record_rows(output: Path, context: RankContext) -> Iterator[None]:
    """Record the rows and the initial adapter of the training that runs in the `with` block."""
    recorder = RowRecorder()

    def add_adapters(*arguments: Any, **options: Any) -> torch.nn.Module:
        adapted: torch.nn.Module = ADD_ADAPTERS(*arguments, **options)
        if context.ranks.is_rank_zero:
            output.mkdir(exist_ok=True)
            trained = {name: each for name, each in adapted.named_parameters() if each.requires_grad}
            save_file({name: each.detach().clone() for name, each in trained.items()}, output / INITIAL_ADAPTER)
        return adapted

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GlobalMeanTrainer, "get_train_dataloader", lambda trainer: recorder.get_train_dataloader(trainer))
        patch.setattr(GlobalMeanTrainer, "get_batch_samples", lambda *each: recorder.get_batch_samples(*each))
        patch.setattr(base_trainer, "compute_evaluation_loss", recorder.compute_evaluation_loss)
        patch.setattr(base_trainer, "build_dataloader", recorder.build_dataloader)
        patch.setattr(evaluation, "build_dataloader", recorder.build_dataloader)
        patch.setattr(load, "add_adapters", add_adapters)
        yield
    recorder.write(output / f"rows.{context.ranks.rank}.json")


def train_recorded_cell(name: str, spec: dict[str, Any], folder: Path, context: RankContext) -> dict[str, Any]:
    """Run a cell and return its metrics, or the error that ended it, which is assumed to end it on all ranks."""
    bugs_file = folder / "bugs.json"
    bug = json.loads(bugs_file.read_text()).get(name) if bugs_file.exists() else None
    try:
        with pytest.MonkeyPatch.context() as patch, record_rows(folder / name, context):
            if bug:
                load_function(bug)(patch)
            return TRAIN_CELL(name, spec, folder, context)
    except Exception as error:  # whatever ends a training is a difference to report
        traceback.print_exc()
        return {"error": type(error).__name__, "message": str(error)}


def load_function(name: str) -> Callable[[pytest.MonkeyPatch], None]:
    """Return the function with this name, `module:function`."""
    module, _, function = name.partition(":")
    found: Callable[[pytest.MonkeyPatch], None] = getattr(importlib.import_module(module), function)
    return found


def prepare() -> None:
    """Import the libraries, which the imports of this module have done."""


def main() -> None:
    """Run all cells on this rank."""
    setattr(cells, TRAIN_CELL.__name__, train_recorded_cell)
    os.environ["TEST_WITHOUT_FORECASTS"] = "1"
    cells.main()
