"""Tests of rows whose images turn out to be unusable when they are decoded, after the rows were tokenized."""

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from finetune_api.batch import Batch
from finetune_trainer.data.batch_sampler import BatchSampler, build_dataloader
from finetune_trainer.data.load import TrainingData
from finetune_trainer.data.micro_batch import MicroBatch
from finetune_trainer.data.row_filter import RowRules
from finetune_trainer.data_sources.media import Modality
from finetune_trainer.errors import DatasetError
from finetune_trainer.storage_faults import raise_storage_faults
from finetune_trainer.vision import processor
from testing.models import tiny_vision
from testing.models.vision_fixtures import LoadedVisionModel, describe_folder, write_rows

SKIP = RowRules(max_length=256, on_bad_row="skip")


@pytest.fixture(scope="module")
def qwen_model(get_vision_folder: Callable[[str], Path]) -> LoadedVisionModel:
    folder = get_vision_folder("qwen2_vl")
    return LoadedVisionModel(folder, describe_folder(folder), None)


def load_rows(model: LoadedVisionModel, folder: Path, rules: RowRules = SKIP, **fields: Any) -> TrainingData:
    """Return three rows with images; that of the second row is truncated after tokenization."""
    rows = []
    for name in "abc":
        file = tiny_vision.write_image(folder, f"{name}.jpg", (280, 280), seed=ord(name))
        messages = [{"role": "user", "content": "<image>?"}, {"role": "assistant", "content": f"It is {name}."}]
        rows.append({"messages": messages, "images": [file]})
    data = model.load_data(write_rows(folder, *rows), rules, **fields)
    truncate(folder / "b.jpg")
    return data


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:2000])


def load_batches(model: LoadedVisionModel, data: TrainingData, *, worker_count: int) -> list[MicroBatch]:
    sampler = BatchSampler(data.order, Batch(1, len(data.order), 1), rank=0)
    collate = model.create_collator(Modality.IMAGE)
    loader = build_dataloader(data.samples, sampler, collate, skips=data.skips, worker_count=worker_count)
    batches = list(loader)
    for batch in batches:
        data.skips.report(batch)
    return batches


@pytest.mark.parametrize("worker_count", [0, 1, 2])
def test_the_row_stays_in_its_place_without_targets(
    qwen_model: LoadedVisionModel, tmp_path: Path, capsys: pytest.CaptureFixture[str], worker_count: int
) -> None:
    data = load_rows(qwen_model, tmp_path)
    expected_order = [item for items in BatchSampler(data.order, Batch(1, 3, 1), rank=0) for item in items]

    batches = load_batches(qwen_model, data, worker_count=worker_count)

    assert [len(batch.targets.ids) > 0 for batch in batches] == [item != 1 for item in expected_order]
    assert all("pixel_values" in batch.inputs for batch in batches), "each rank runs the vision tower in each step"
    (((name, index), message),) = data.skips.rows.items()
    assert (name, index) == ("train", 1)
    assert "rows.jsonl line 2: image" in message
    assert capsys.readouterr().out.count("warning: train: a row is skipped from now on") == 1


def test_a_row_that_an_earlier_attempt_skipped_is_not_decoded_again(
    qwen_model: LoadedVisionModel, tmp_path: Path
) -> None:
    first, resumed = load_rows(qwen_model, tmp_path), load_rows(qwen_model, tmp_path)
    load_batches(qwen_model, first, worker_count=0)

    resumed.skips.rows |= first.skips.rows
    tiny_vision.write_image(tmp_path, "b.jpg", (280, 280), seed=ord("b"))  # the file is repaired

    batches = load_batches(qwen_model, resumed, worker_count=1)
    assert sum(len(batch.targets.ids) > 0 for batch in batches) == 2
    assert all(not batch.skipped_rows for batch in batches)


def test_the_other_rows_of_a_pack_are_trained(qwen_model: LoadedVisionModel, tmp_path: Path) -> None:
    data = load_rows(qwen_model, tmp_path, packing=True, maxLength=400)
    full = sum(int((data.train[index][0]["labels"][1:] != -100).sum()) for index in (0, 2))

    batches = load_batches(qwen_model, data, worker_count=1)

    assert sum(len(batch.targets.ids) for batch in batches) == full


def test_without_skip_the_error_names_row_and_file(qwen_model: LoadedVisionModel, tmp_path: Path) -> None:
    data = load_rows(qwen_model, tmp_path, RowRules())

    with pytest.raises(DatasetError, match=r"^\S*rows.jsonl line 2: image \S*b.jpg cannot be read .*; replace it"):
        load_batches(qwen_model, data, worker_count=1)


@pytest.mark.parametrize("worker_count", [0, 1])
def test_an_io_error_is_never_skipped(
    qwen_model: LoadedVisionModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, worker_count: int
) -> None:
    data = load_rows(qwen_model, tmp_path)

    def fail(_source: object) -> None:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    monkeypatch.setattr(processor, "open_upright_image", fail)
    with pytest.raises(Exception, match="Stale file handle") as caught, raise_storage_faults():
        load_batches(qwen_model, data, worker_count=worker_count)

    assert type(caught.value).__name__ == "StorageFault"
    assert data.skips.rows == {}
