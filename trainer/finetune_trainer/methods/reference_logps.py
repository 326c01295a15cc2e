"""Log-probabilities of DPO's reference model for all rows, computed once before training (decisions/524)."""

import time
import zlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch.utils.data import Dataset

from finetune_supervisor import contract
from finetune_trainer.atomic_files import translate_disk_errors
from finetune_trainer.data.batch_sampler import BatchSampler, build_dataloader
from finetune_trainer.data.epoch_order import RowOrder
from finetune_trainer.data.load import SampleDataset
from finetune_trainer.data.micro_batch import MicroBatch
from finetune_trainer.data.token_dataset import FILLER, REFERENCE_LOGPS, Features, TokenDataset
from finetune_trainer.distributed.collectives import run_on_rank_zero
from finetune_trainer.training.trainer_inputs import TrainerInputs

_FOLDER, _FILE = "reference-logps", "logps.safetensors"
_KEY = "settings and rows"

ComputeLogps = Callable[[MicroBatch], torch.Tensor]  # returns the log-probabilities of a micro-batch, (pairs, 2)


class ReferenceLogps:
    """Log-probabilities of the chosen and rejected completions by dataset, each (rows, 2); empty before `prepare`."""

    def __init__(self) -> None:
        self.by_dataset: dict[str, torch.Tensor] = {}

    def prepare(self, inputs: TrainerInputs, compute: ComputeLogps, *, worker_count: int) -> None:
        """Load the values that an earlier attempt saved, or compute and save them (collective).

        Saved values make a resumed run equal to one that was not interrupted, because values that are computed in other
        micro-batches or on other devices differ in the last bits.
        """
        datasets = {name: rows for name in ("train", "eval") if (rows := getattr(inputs.data, name)) is not None}
        folder = inputs.checkpoints.output.checkpoints / _FOLDER
        key = " ".join((inputs.plan.fingerprint, inputs.data.digest, *(rows.cache_key for rows in datasets.values())))
        saved = run_on_rank_zero(lambda: load_saved_logps(folder / _FILE, key))
        if saved is not None:
            self.by_dataset = saved
            return
        started_at = time.monotonic()
        inputs.heartbeat.enter_phase(contract.LOAD)
        computed = {
            name: compute_logps(inputs, rows, compute, worker_count=worker_count) for name, rows in datasets.items()
        }
        inputs.heartbeat.enter_phase(contract.TRAIN)
        run_on_rank_zero(lambda: inputs.checkpoints.publish(folder, lambda path: _save(computed, path, key)))
        if inputs.ranks.is_rank_zero:
            row_count = sum(map(len, datasets.values()))
            print(f"reference model: {row_count} rows in {time.monotonic() - started_at:.0f} s", flush=True)
        self.by_dataset = computed


class ReferenceDataset(Dataset[tuple[Features, ...]]):
    """Adds the log-probability of the reference model to each sequence, once it has been computed."""

    def __init__(self, samples: SampleDataset, logps: ReferenceLogps, name: str) -> None:
        self._samples = samples
        self._logps = logps
        self._name = name

    def __getitem__(self, index: int) -> tuple[Features, ...]:
        sequences = self._samples[index]
        if self._name not in self._logps.by_dataset:
            return sequences
        row = torch.zeros(2) if index == FILLER else self._logps.by_dataset[self._name][index]
        return tuple(
            {**sequence, REFERENCE_LOGPS: value} for sequence, value in zip(sequences, row[:, None], strict=True)
        )


@torch.no_grad()
def compute_logps(
    inputs: TrainerInputs, rows: TokenDataset, compute: ComputeLogps, *, worker_count: int
) -> torch.Tensor:
    """Return the log-probabilities of both completions of each row, (rows, 2), each computed by one rank."""
    sampler = BatchSampler(RowOrder(rows.lengths, seed=None), inputs.plan.eval_batch, rank=inputs.ranks.rank)
    samples = inputs.data.add_pixel_inputs(rows)
    logps = torch.zeros(len(rows), 2)
    skips = inputs.data.skips
    batches = build_dataloader(samples, sampler, inputs.collate, skips=skips, worker_count=worker_count)
    for items, batch in zip(sampler, batches, strict=True):
        skips.report(batch)
        values = compute(batch).cpu()
        for item, value in zip(items, values, strict=True):
            if item != FILLER:
                logps[item] = value
        inputs.heartbeat.touch()
    torch.distributed.all_reduce(logps)  # every row has a value on one rank and zeros on the others
    return logps


def load_saved_logps(file: Path, key: str) -> dict[str, torch.Tensor] | None:
    """Return the saved values, or None if there are none for this key."""
    with suppress(OSError, SafetensorError), safe_open(file, framework="pt") as saved:
        logps = {name: saved.get_tensor(name) for name in saved.keys()}  # noqa: SIM118  not a dictionary
        if (saved.metadata() or {}).get(_KEY) in (key, _add_checksum(key, logps)):  # older: the key only
            return logps
    return None


def _add_checksum(key: str, logps: Mapping[str, torch.Tensor]) -> str:
    content = b"".join(logps[name].numpy().tobytes() for name in sorted(logps))
    return f"{key} {zlib.crc32(content):08x}"


def _save(logps: dict[str, torch.Tensor], folder: Path, key: str) -> None:
    metadata: dict[str, Any] = {_KEY: _add_checksum(key, logps)}
    with translate_disk_errors(folder):
        save_file(logps, folder / _FILE, metadata=metadata)
