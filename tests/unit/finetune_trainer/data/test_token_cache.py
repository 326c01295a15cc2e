"""Tests that the token cache returns rows, stats, weights and origins unchanged."""

import hashlib
import json
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
from finetune_trainer.data.token_cache import CacheRole, compute_cache_key, load_or_tokenize, start_source_check
from finetune_trainer.data.token_dataset import IGNORE_INDEX, TokenDataset
from finetune_trainer.data_sources.file_digests import compute_file_digest
from finetune_trainer.errors import DatasetError

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
    return load_or_tokenize(folder, lambda: rows, **{**WRITER_OPTIONS, "rules": RowRules(max_length)})


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

    assert (len(second), second.get_origin(0)) == (1, "rows line 2")
    assert (second.lengths.tolist(), second.token_count) == ([4], 4)
    assert second[0][0]["input_ids"].tolist() == [8, 9, 10, 11]
    assert second[-1][0]["input_ids"].tolist() == [0]
    assert len(data) == 2


def test_cached_rows_are_not_rendered_again(tmp_path: Path) -> None:
    load_tokens(tmp_path / "key")

    for job_uid, attempt in (("first", 1), ("second", 0)):
        options = {**WRITER_OPTIONS, "job_uid": job_uid, "attempt": attempt}
        assert len(load_or_tokenize(tmp_path / "key", fail_if_called, **options)) == 2


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
        while token_cache._measure_progress(folder) == before and time.monotonic() < deadline:
            if list(tmp_path.glob(".key-*.json")):
                return
            time.sleep(0.01)

    monkeypatch.setattr(token_cache, "time", SimpleNamespace(monotonic=lambda: clock[0], sleep=sleep, time=time.time))
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
        load_or_tokenize(tmp_path / "key", raise_after_one_row, **WRITER_OPTIONS)

    assert list(tmp_path.iterdir()) == []


def test_the_cache_key_depends_on_the_file_and_every_parameter(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text("{}")
    keys = {compute_cache_key([file], *parameters) for parameters in ([], ["a"], ["b"], ["a", 8], ["a", None])}
    os.utime(file, ns=(1, 1))
    keys.add(compute_cache_key([file]))

    assert len(keys) == 6
    assert compute_cache_key([file]) == compute_cache_key([file])


def write_rows(file: Path, content: str) -> Path:
    """Write a file whose modification time does not show the change."""
    file.write_text(content)
    os.utime(file, ns=(0, 0))
    return file


def load_row(
    folder: Path, file: Path, sample: Sample | None, *, former: tuple[Path, str] | None = None
) -> TokenDataset:
    """Load a row, or tokenize `sample`; a test fails if the row is tokenized although `sample` is None."""
    rows = (lambda: [(sample,)]) if sample else fail_if_called
    return load_or_tokenize(folder, rows, files=[file], former=former, **WRITER_OPTIONS)


def test_changed_rows_of_equal_size_and_time_are_tokenized_again(tmp_path: Path) -> None:
    file = write_rows(tmp_path / "rows.jsonl", "yes")
    first = load_row(tmp_path / "key", file, SAMPLES[0])
    write_rows(file, "nay")

    second = load_row(tmp_path / "key", file, SAMPLES[1])

    assert second[0][0]["input_ids"].tolist() == SAMPLES[1].input_ids
    assert second.files[0].sha256 == hashlib.sha256(b"nay").hexdigest()
    assert first.content_digest != second.content_digest
    assert TokenDataset(first.folder).files[0].sha256 == hashlib.sha256(b"yes").hexdigest()  # other jobs may use it


def test_changed_rows_of_a_large_file_stop_the_job_and_the_next_one_reads_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(token_cache, "MAX_COMPARED_BYTES", 2)
    file = write_rows(tmp_path / "rows.jsonl", "yes")
    load_row(tmp_path / "key", file, SAMPLES[0])
    write_rows(file, "nay")

    data = load_row(tmp_path / "key", file, None)
    with pytest.raises(DatasetError, match=rf"{file} has changed .* trained on the old rows, in {data.folder}"):
        start_source_check([data]).result()

    assert load_row(tmp_path / "key", file, SAMPLES[1]).files[0].sha256 != data.files[0].sha256


@pytest.mark.parametrize("change", ["removed", "replaced"])
def test_a_large_file_that_is_replaced_after_it_was_tokenized_does_not_stop_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    monkeypatch.setattr(token_cache, "MAX_COMPARED_BYTES", 2)
    file = write_rows(tmp_path / "rows.jsonl", "yes")
    data = load_row(tmp_path / "key", file, SAMPLES[0])

    def change_and_compute_digest(*arguments: Any, **options: Any) -> Any:
        file.unlink() if change == "removed" else file.write_text("new")
        return compute_file_digest(*arguments, **options)

    monkeypatch.setattr(token_cache, "compute_file_digest", change_and_compute_digest)

    assert start_source_check([data]).result() is None


def test_a_file_that_changes_while_its_rows_are_read_is_an_error(tmp_path: Path) -> None:
    file = write_rows(tmp_path / "rows.jsonl", "yes")

    def render() -> Iterator[RenderedRow]:
        yield (SAMPLES[0],)
        file.write_text("more rows")

    with pytest.raises(DatasetError, match="a file changed while its rows were read"):
        load_or_tokenize(tmp_path / "key", render, files=[file], **WRITER_OPTIONS)


def test_two_jobs_that_tokenize_the_same_rows_use_the_first_entry(tmp_path: Path) -> None:
    def render() -> Iterator[RenderedRow]:
        yield (SAMPLES[0],)
        load_tokens(tmp_path / "key")

    data = load_or_tokenize(tmp_path / "key", render, job_uid="other", **WRITER_OPTIONS)

    assert len(data) == 2
    assert list(tmp_path.glob("[!.]*")) == [data.folder]


@pytest.mark.parametrize(
    "name", ["meta.json", "tokens.bin", "weights.bin", "ends.npy", "places.npy", "image-ends.npy", "images.json"]
)
@pytest.mark.parametrize("damage", ["zeroed", "truncated", "removed"])
def test_a_damaged_entry_is_rewritten_and_kept_for_jobs_that_use_it(
    tmp_path: Path, name: str, damage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    damaged = load_tokens(tmp_path / "key").folder
    file, size = damaged / name, (damaged / name).stat().st_size
    file.unlink() if damage == "removed" else file.write_bytes(bytes(size - (damage == "truncated")))

    data = load_tokens(tmp_path / "key")

    assert data[0][0]["input_ids"].tolist() == [5, 6, 7]
    assert data.folder != damaged
    assert damaged.exists()
    assert f"token cache: {damaged} is not used, because" in capsys.readouterr().out
    assert load_or_tokenize(tmp_path / "key", fail_if_called, **WRITER_OPTIONS).folder == data.folder


def test_old_files_that_no_job_uses_are_deleted(tmp_path: Path) -> None:
    """Notes of attempts, folders of killed writers, and entries that cannot be used; newer ones stay."""
    old = load_tokens(tmp_path / "key").folder
    (tmp_path / ".other-killed").mkdir()
    (tmp_path / ".other-killed" / "tokens.bin").touch()
    (old / "tokens.bin").unlink()
    for path in tmp_path.iterdir():
        os.utime(path, (0, 0))
    damaged = load_tokens(tmp_path / "key").folder
    (damaged / "tokens.bin").unlink()

    data = load_or_tokenize(tmp_path / "key", lambda: [(SAMPLES[0],)], job_uid="next", **WRITER_OPTIONS)

    assert set(tmp_path.glob("[!.]*")) == {damaged, data.folder}
    assert {path.name for path in tmp_path.glob(".*")} == {".key--0.json", ".key-next-0.json"}


def write_unsealed_entry(folder: Path, file: Path) -> Path:
    """Write an entry as a release without checksums did."""
    meta_file = load_row(folder, file, SAMPLES[0]).folder / "meta.json"
    meta = json.loads(meta_file.read_text())
    for key in ("records", "checksum"):
        del meta[key]
    meta_file.write_text(json.dumps(meta))
    return folder


def test_the_entry_of_a_former_release_is_used_before_that_of_the_folder(tmp_path: Path) -> None:
    file = write_rows(tmp_path / "rows.jsonl", "yes")
    former = write_unsealed_entry(tmp_path / "former", file)
    load_row(tmp_path / "key", file, SAMPLES[1])

    data = load_row(tmp_path / "key", file, None, former=(former, ""))

    assert (data.folder, data.content_digest, data.identity) == (former, "", {})


@pytest.mark.parametrize(("digest", "is_damaged"), [("other rows", False), ("", True)])
def test_other_rows_and_damage_replace_the_entry_of_a_former_release(
    tmp_path: Path, digest: str, is_damaged: bool
) -> None:
    file = write_rows(tmp_path / "rows.jsonl", "yes")
    former = write_unsealed_entry(tmp_path / "former", file)
    if is_damaged:
        (former / "tokens.bin").write_bytes(bytes(8))

    assert load_row(tmp_path / "key", file, SAMPLES[0], former=(former, digest)).content_digest


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
    assert [key for key in data.identity if key.startswith("file ")] == [f"file {file}" for file in files]
    for file, digest in zip(files, data.files, strict=True):
        assert digest.sha256 == hashlib.sha256(file.read_bytes()).hexdigest()
        assert digest.size_bytes == file.stat().st_size
    assert not list((tmp_path / "key").glob("*progress*"))
