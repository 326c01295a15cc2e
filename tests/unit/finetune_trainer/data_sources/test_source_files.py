"""Which files a source means: a path, a folder, or a dataset on the Hub."""

import errno
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import pytest
from huggingface_hub import HfApi, snapshot_download

from finetune_api.v1alpha1.dataset import DatasetSource
from finetune_trainer.data_sources import source_files as trainers_files
from finetune_trainer.data_sources.source_files import EVAL, TRAIN, choose, find_files
from finetune_trainer.errors import DatasetError, DiskFull, HubUnavailable
from testing.fakes.downloads import NONE, downloads
from testing.fakes.hub import SHA, FakeHub, serve_hub

FIELD = f"{TRAIN}[0].name"
ROWS = b'{"prompt": "a", "completion": "b"}\n'
ACME = {
    "README.md": b"# Rows",
    "data/train-00000-of-00002.jsonl": ROWS,
    "data/train-00001-of-00002.jsonl": ROWS,
    "data/test-00000-of-00001.jsonl": ROWS,
    "data/trainer-notes.csv": b"a",
}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    with serve_hub() as hub:
        hub.datasets["acme/rows"] = dict(ACME)
        monkeypatch.setattr(trainers_files, "HfApi", lambda: HfApi(endpoint=hub.address))

        def from_here(*args: str, **options: object) -> str:
            return snapshot_download(*args, endpoint=hub.address, **options)  # type: ignore[call-overload,no-any-return]

        monkeypatch.setattr(trainers_files, "snapshot_download", from_here)
        yield hub


def test_a_folder_gives_its_files_in_order_of_names_and_leaves_others_alone(tmp_path: Path) -> None:
    for name in ("b.jsonl", "a.csv", "README.md"):
        (tmp_path / name).write_text("x")

    found = find_files(DatasetSource(name=str(tmp_path)), NONE, field=FIELD)

    assert [file.name for file in found] == ["a.csv", "b.jsonl"]


@pytest.mark.parametrize(
    ("make", "message"), [(None, "does not exist"), ("rows.txt", "no .jsonl, .json, .csv"), ("", "it holds nothing")]
)
def test_a_missing_or_unknown_file_is_named_with_its_field(tmp_path: Path, make: str | None, message: str) -> None:
    path = tmp_path / ("none.jsonl" if make is None else make)
    if make:
        path.write_text("x")

    with pytest.raises(DatasetError) as raised:
        find_files(DatasetSource(name=str(path)), NONE, field=FIELD)

    assert str(raised.value).startswith(f'{FIELD}: "{path}"')
    assert message in str(raised.value)


@pytest.mark.parametrize(
    ("asked", "names"),
    [
        ({}, ["main/dev.jsonl", "main/train.jsonl", "socratic/training_0.parquet", "train.csv"]),
        ({"split": "train"}, ["main/train.jsonl", "socratic/training_0.parquet", "train.csv"]),
        ({"split": "validation"}, ["main/dev.jsonl"]),
        ({"subset": "main"}, ["main/dev.jsonl", "main/train.jsonl"]),
        ({"subset": "socratic", "split": "train"}, ["socratic/training_0.parquet"]),
    ],
)
def test_splits_and_subsets_are_told_by_paths(asked: dict[str, str], names: list[str]) -> None:
    there = ["main/dev.jsonl", "main/train.jsonl", "socratic/training_0.parquet", "train.csv", "train.md"]
    source = DatasetSource.model_validate({"name": "/data", **asked})

    assert [str(name) for name in choose([PurePosixPath(name) for name in there], source, field=FIELD)] == names


def test_a_split_that_is_not_there_is_named_with_what_is() -> None:
    with pytest.raises(DatasetError, match=r"holds no .* file of subset main of split test; it holds main/train\.csv"):
        choose([PurePosixPath("main/train.csv")], DatasetSource(name="d", subset="main", split="test"), field=FIELD)


@pytest.mark.parametrize(
    ("field", "names"),
    [
        (TRAIN, ["data/train-00000-of-00002.jsonl", "data/train-00001-of-00002.jsonl"]),
        (EVAL, ["data/test-00000-of-00001.jsonl"]),
    ],
)
def test_a_dataset_on_the_hub_is_downloaded_with_the_split_that_is_meant(
    hub: FakeHub, tmp_path: Path, field: str, names: list[str]
) -> None:
    found = find_files(DatasetSource(name="acme/rows"), downloads(tmp_path), field=f"{field}[0].name")

    folder = tmp_path / f"acme--rows@{SHA}"
    assert [str(file.relative_to(folder)) for file in found] == names
    assert all(file.read_bytes() == ROWS for file in found)
    assert not (folder / "README.md").exists()


def test_every_rank_and_every_attempt_reads_what_was_downloaded_first(hub: FakeHub, tmp_path: Path) -> None:
    source = DatasetSource(name="acme/rows", split="test")
    first = find_files(source, downloads(tmp_path), field=FIELD)
    asked = len(hub.asked)

    hub.datasets["acme/rows"]["data/test-00001-of-00001.jsonl"] = ROWS
    assert find_files(source, downloads(tmp_path), field=FIELD) == first
    assert find_files(source, downloads(tmp_path, writes=False), field=FIELD) == first
    assert len(hub.asked) == asked
    assert len(find_files(source, downloads(tmp_path, job="another"), field=FIELD)) == 2


def test_a_rank_does_not_wait_for_ever(tmp_path: Path) -> None:
    with pytest.raises(HubUnavailable, match=r'did not download "acme/rows" .* spec\.training\.ddpTimeout'):
        find_files(DatasetSource(name="acme/rows"), downloads(tmp_path, writes=False), field=FIELD)


def test_a_dataset_that_nobody_has_is_the_users_to_correct(hub: FakeHub, tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match=r'train\[0\]\.name: "acme/none" is no path here and no dataset on the Hub'):
        find_files(DatasetSource(name="acme/none"), downloads(tmp_path), field=FIELD)


def test_a_disk_that_is_full_is_not_the_hubs_fault(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fill(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(trainers_files, "snapshot_download", fill)

    with pytest.raises(DiskFull, match="is full"):
        find_files(DatasetSource(name="acme/rows"), downloads(tmp_path), field=FIELD)


def test_a_hub_that_is_out_of_order_may_be_asked_again(hub: FakeHub, tmp_path: Path) -> None:
    hub.broken = 501  # which the client does not ask for again by itself

    with pytest.raises(HubUnavailable, match=r'could not give dataset "acme/rows"'):
        find_files(DatasetSource(name="acme/rows"), downloads(tmp_path), field=FIELD)
