"""Tests of the saved log-probabilities of DPO's reference model."""

from pathlib import Path

import torch
from safetensors.torch import save_file

from finetune_trainer.data.collator import Collator, SequenceLayout
from finetune_trainer.data.token_dataset import FILLER, REFERENCE_LOGPS, Features
from finetune_trainer.methods.reference_logps import ReferenceDataset, ReferenceLogps, _save, load_saved_logps

LOGPS = {"train": torch.tensor([[-1.0, -2.0], [-3.0, -4.0]]), "eval": torch.tensor([[-5.0, -6.0]])}


def test_saved_values_are_loaded_for_the_same_key_only(tmp_path: Path) -> None:
    file = tmp_path / "logps.safetensors"
    assert load_saved_logps(file, "key") is None
    _save(LOGPS, tmp_path, "key")

    loaded = load_saved_logps(file, "key")

    assert loaded is not None
    assert loaded.keys() == LOGPS.keys()
    assert all(torch.equal(values, LOGPS[name]) for name, values in loaded.items())
    assert load_saved_logps(file, "other settings") is None


def test_a_damaged_or_foreign_file_is_ignored(tmp_path: Path) -> None:
    file = tmp_path / "logps.safetensors"
    _save(LOGPS, tmp_path, "key")
    file.write_bytes(file.read_bytes()[:-4])
    assert load_saved_logps(file, "key") is None
    save_file(LOGPS, file)
    assert load_saved_logps(file, "key") is None


def test_values_with_other_content_than_was_written_are_computed_again(tmp_path: Path) -> None:
    file = tmp_path / "logps.safetensors"
    _save(LOGPS, tmp_path, "key")
    file.write_bytes(file.read_bytes()[:-4] + bytes(4))
    assert load_saved_logps(file, "key") is None

    save_file(LOGPS, file, metadata={"settings and rows": "key"})  # as a release without checksums
    assert load_saved_logps(file, "key") is not None


class TwoRows(torch.utils.data.Dataset[tuple[Features, ...]]):
    """Preference pairs whose chosen sequence is longer than the rejected one."""

    def __getitem__(self, index: int) -> tuple[Features, ...]:
        tokens = torch.arange(1, 5)
        return tuple({"input_ids": tokens[:length], "labels": tokens[:length]} for length in (4, 2))


def test_each_sequence_of_a_batch_has_its_value() -> None:
    logps = ReferenceLogps()
    samples = ReferenceDataset(TwoRows(), logps, "train")
    assert REFERENCE_LOGPS not in samples[0][0]
    logps.by_dataset = LOGPS

    batch = Collator(0, SequenceLayout())([samples[1], samples[0], samples[FILLER]])

    assert batch.reference_logps is not None
    assert batch.reference_logps.tolist() == [-3.0, -1.0, 0.0, -4.0, -2.0, 0.0]
    assert batch.lengths == (4, 4, 4, 2, 2, 2)
