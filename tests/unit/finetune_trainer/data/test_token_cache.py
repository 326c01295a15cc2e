"""Tests that the token cache returns rows, stats, weights and origins unchanged."""

import hashlib
import os
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from finetune_trainer.chat_template.samples import Sample
from finetune_trainer.data import token_cache
from finetune_trainer.data.row_filter import RowRules
from finetune_trainer.data.row_rendering import RenderedRow
from finetune_trainer.data.token_cache import CacheRole, compute_cache_key, load_or_tokenize
from finetune_trainer.data.token_dataset import IGNORE_INDEX, TokenDataset

SAMPLES = [
    Sample("rows line 1", [5, 6, 7], [0.0, 1.0, 1.0]),
    Sample("rows line 2", [8, 9, 10, 11], [0.0, 0.0, 0.0, 1.0]),
    Sample("rows line 3", [12, 13], [0.0, 0.0]),
]


WRITER_OPTIONS: dict[str, Any] = {"rules": RowRules(), "role": CacheRole.WRITER, "send_heartbeat": lambda: None}


def load_tokens(
    folder: Path, rows: Sequence[RenderedRow] | None = None, *, max_length: int | None = None
) -> TokenDataset:
    rows = [(sample,) for sample in SAMPLES] if rows is None else rows
    return load_or_tokenize(
        folder, lambda: rows, rules=RowRules(max_length), role=CacheRole.WRITER, send_heartbeat=lambda: None
    )


def test_the_loss_ignores_labels_of_tokens_with_weight_zero(tmp_path: Path) -> None:
    data = load_tokens(tmp_path / "key")

    assert len(data) == 2
    assert data[0][0]["input_ids"].tolist() == [5, 6, 7]
    assert data[0][0]["labels"].tolist() == [IGNORE_INDEX, 6, 7]
    assert data[1][0]["labels"].tolist() == [IGNORE_INDEX, IGNORE_INDEX, IGNORE_INDEX, 11]


def test_the_cache_contains_the_row_stats(tmp_path: Path) -> None:
    load_tokens(tmp_path / "key", max_length=3)

    stats = TokenDataset(tmp_path / "key").stats

    assert (stats.rows, stats.kept) == (3, 1)
    assert stats.too_long.first == ("rows line 2 (4)",)
    assert stats.nothing_to_learn.first == ("rows line 3",)


def test_a_filler_has_one_token_and_no_target(tmp_path: Path) -> None:
    (filler,) = load_tokens(tmp_path / "key")[-1]

    assert filler["labels"].tolist() == [IGNORE_INDEX]
    assert filler["input_ids"].shape == (1,)


def test_the_dataset_contains_the_length_and_origin_of_every_row(tmp_path: Path) -> None:
    data = load_tokens(tmp_path / "key")

    assert data.lengths.tolist() == [3, 4]
    assert data.token_count == 7
    assert [data.get_origin(0), data.get_origin(1)] == ["rows line 1", "rows line 2"]


def test_select_returns_a_dataset_of_the_selected_rows(tmp_path: Path) -> None:
    data = load_tokens(tmp_path / "key")

    second = data.select(data.lengths.argsort()[1:])

    assert (len(second), second.get_origin(0), second.lengths.tolist(), second.token_count) == (
        1,
        "rows line 2",
        [4],
        4,
    )
    assert second[0][0]["input_ids"].tolist() == [8, 9, 10, 11]
    assert second[-1][0]["input_ids"].tolist() == [0]
    assert len(data) == 2


def test_cached_rows_are_not_rendered_again(tmp_path: Path) -> None:
    load_tokens(tmp_path / "key")

    data = load_or_tokenize(
        tmp_path / "key", fail_if_called, rules=RowRules(), role=CacheRole.WRITER, send_heartbeat=lambda: None
    )

    assert len(data) == 2


class SlowWriter:
    """Writes the cache in a thread, one row at a time."""

    def __init__(self, folder: Path) -> None:
        self._row_written = threading.Semaphore(0)
        self._thread = threading.Thread(target=load_or_tokenize, args=(folder, self._render), kwargs=WRITER_OPTIONS)
        self._thread.start()

    def _render(self) -> Iterator[RenderedRow]:
        for number in range(4):
            self._row_written.acquire()
            yield (Sample(f"row {number}", [1] * 10_000, [0.0] + [1.0] * 9_999),)  # more than a file buffer

    def write_rows(self, count: int) -> None:
        self._row_written.release(count)

    def join(self) -> None:
        self._thread.join()


def fail_if_called() -> Iterator[RenderedRow]:
    raise AssertionError


@pytest.mark.parametrize("role", [CacheRole.DEPUTY, CacheRole.READER])
def test_other_processes_use_the_rows_of_the_writer(tmp_path: Path, role: CacheRole) -> None:
    writer = SlowWriter(tmp_path / "key")
    writer.write_rows(4)

    data = load_or_tokenize(tmp_path / "key", fail_if_called, **{**WRITER_OPTIONS, "role": role})

    writer.join()
    assert len(data) == 4


def test_a_deputy_writes_if_the_writer_makes_no_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The storage may not be shared, or the writer may have failed."""
    monkeypatch.setattr(token_cache, "TAKEOVER_SECONDS", 0.3)
    (tmp_path / ".key-gone-1").mkdir()
    (tmp_path / ".key-gone-1" / "tokens.bin").write_bytes(b"1234")

    data = load_or_tokenize(tmp_path / "key", lambda: [(SAMPLES[0],)], **{**WRITER_OPTIONS, "role": CacheRole.DEPUTY})

    assert len(data) == 1


def test_a_deputy_waits_as_long_as_the_writer_makes_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, clock, heartbeats = tmp_path / "key", [0.0], list[None]()
    writer = SlowWriter(folder)

    def sleep(_seconds: float) -> None:
        """Let 50 seconds pass on the clock of the deputy, in which the writer writes a row."""
        clock[0] += 50
        before, deadline = token_cache._measure_progress(folder), time.monotonic() + 30
        writer.write_rows(1)
        while token_cache._measure_progress(folder) == before and not folder.exists() and time.monotonic() < deadline:
            time.sleep(0.01)

    monkeypatch.setattr(token_cache, "time", SimpleNamespace(monotonic=lambda: clock[0], sleep=sleep))
    options = {**WRITER_OPTIONS, "role": CacheRole.DEPUTY, "send_heartbeat": lambda: heartbeats.append(None)}

    data = load_or_tokenize(folder, fail_if_called, **options)

    writer.join()
    assert len(data) == 4
    assert len(heartbeats) >= 3
    assert clock[0] > token_cache.TAKEOVER_SECONDS


def test_a_failed_write_leaves_no_files_behind(tmp_path: Path) -> None:
    def raise_after_one_row() -> Iterator[RenderedRow]:
        yield (SAMPLES[0],)
        raise ValueError

    with pytest.raises(ValueError):  # noqa: PT011
        load_or_tokenize(
            tmp_path / "key", raise_after_one_row, rules=RowRules(), role=CacheRole.WRITER, send_heartbeat=lambda: None
        )

    assert list(tmp_path.iterdir()) == []


def test_the_cache_key_depends_on_the_file_and_every_parameter(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text("{}")
    keys = {compute_cache_key([file], *parameters) for parameters in ([], ["a"], ["b"], ["a", 8], ["a", None])}
    os.utime(file, ns=(1, 1))
    keys.add(compute_cache_key([file]))

    assert len(keys) == 6
    assert compute_cache_key([file]) == compute_cache_key([file])


def test_a_pair_has_two_sequences(tmp_path: Path) -> None:
    chosen, rejected = Sample("row 1", [1, 2], [0.0, 1.0]), Sample("row 1", [1, 2, 3], [0.0, 1.0, 1.0])
    data = load_tokens(tmp_path / "key", [(chosen, rejected)])

    assert (len(data), len(data[0]), len(data[-1])) == (1, 2, 2)
    assert (data.lengths.tolist(), data.token_count) == ([3], 5)


def test_samples_include_weights_only_if_some_weights_are_neither_0_nor_1(tmp_path: Path) -> None:
    weighted = [(Sample("row 1", [1, 2, 3], [0.0, 0.25, 1.0]),)]
    (features,) = load_tokens(tmp_path / "key", weighted)[0]

    assert features["weights"].tolist() == [0.0, 0.25, 1.0]
    assert features["labels"].tolist() == [IGNORE_INDEX, 2, 3]
    assert "weights" not in load_tokens(tmp_path / "other")[0][0]


def test_rows_have_the_digests_of_their_files(tmp_path: Path) -> None:
    files = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    for file in files:
        file.write_text(f"{file.name}\n" * 9)

    data = load_or_tokenize(tmp_path / "key", lambda: [(SAMPLES[0],)], files=files, **WRITER_OPTIONS)

    assert [Path(digest.path).name for digest in data.files] == ["a.jsonl", "b.jsonl"]
    for file, digest in zip(files, data.files, strict=True):
        assert digest.sha256 == hashlib.sha256(file.read_bytes()).hexdigest()
        assert digest.size_bytes == file.stat().st_size
    assert not list((tmp_path / "key").glob("*progress*"))
