"""Tests finding the files of a source in folders and on the Hub."""

import errno
import json
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import pytest
from huggingface_hub import HfApi, snapshot_download
from modelscope_hub import _legacy_api

from finetune_api.v1alpha1.dataset import DatasetSource
from finetune_trainer.data_sources import source_files
from finetune_trainer.data_sources.source_files import EVAL_FIELD, TRAIN_FIELD, find_files, select_files
from finetune_trainer.errors import DatasetError, DiskFull, HubUnavailable, OutputError
from testing.fakes.downloads import NO_DOWNLOADS, build_download_settings
from testing.fakes.hub import SHA, FakeHub, serve_hub
from testing.fakes.modelscope import FakeModelScope, FakeRepository, serve_modelscope

FIELD = f"{TRAIN_FIELD}[0].name"
MODELSCOPE_ID = "AI-ModelScope/alpaca-gpt4-data-zh"
ROWS = b'{"prompt": "a", "completion": "b"}\n'
HUB_FILES = {
    "README.md": b"# Rows",
    "data/train-00000-of-00002.jsonl": ROWS,
    "data/train-00001-of-00002.jsonl": ROWS,
    "data/test-00000-of-00001.jsonl": ROWS,
    "data/trainer-notes.csv": b"a",
}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    with serve_hub() as hub:
        hub.datasets["acme/rows"] = dict(HUB_FILES)
        monkeypatch.setattr(source_files, "HfApi", lambda: HfApi(endpoint=hub.address))

        def download_from_fake_hub(*args: str, **options: object) -> str:
            return snapshot_download(*args, endpoint=hub.address, **options)  # type: ignore[call-overload,no-any-return]

        monkeypatch.setattr(source_files, "snapshot_download", download_from_fake_hub)
        yield hub


def test_the_server_of_a_hub_does_not_choose_the_folder(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("testing.fakes.hub.SHA", "x/../../../outside")

    with pytest.raises(HubUnavailable, match="the Hub returned the commit 'x/"):
        find_files(DatasetSource(name="acme/rows"), build_download_settings(tmp_path / "a/b"), spec_field=FIELD)

    assert hub.downloaded_paths == ["/api/datasets/acme/rows"]
    assert list(tmp_path.iterdir()) == []


def test_files_of_a_folder_are_sorted_and_other_formats_are_ignored(tmp_path: Path) -> None:
    for name in ("b.jsonl", "a.csv", "README.md"):
        (tmp_path / name).write_text("x")

    files = find_files(DatasetSource(name=str(tmp_path)), NO_DOWNLOADS, spec_field=FIELD)

    assert [file.name for file in files] == ["a.csv", "b.jsonl"]


@pytest.mark.parametrize(
    ("name", "message"),
    [(None, "does not exist"), ("rows.txt", "neither a .jsonl, .json, .csv"), ("", "it contains nothing")],
    ids=["missing file", "unknown format", "empty folder"],
)
def test_the_error_for_a_missing_or_unsupported_file_contains_the_spec_field(
    tmp_path: Path, name: str | None, message: str
) -> None:
    path = tmp_path / ("none.jsonl" if name is None else name)
    if name:
        path.write_text("x")

    with pytest.raises(DatasetError) as raised:
        find_files(DatasetSource(name=str(path)), NO_DOWNLOADS, spec_field=FIELD)

    assert str(raised.value).startswith(f'{FIELD}: "{path}"')
    assert message in str(raised.value)


@pytest.mark.parametrize(
    ("source_fields", "expected"),
    [
        ({}, ["main/dev.jsonl", "main/train.jsonl", "socratic/training_0.parquet", "train.csv"]),
        ({"split": "train"}, ["main/train.jsonl", "socratic/training_0.parquet", "train.csv"]),
        ({"split": "validation"}, ["main/dev.jsonl"]),
        ({"subset": "main"}, ["main/dev.jsonl", "main/train.jsonl"]),
        ({"subset": "socratic", "split": "train"}, ["socratic/training_0.parquet"]),
    ],
)
def test_files_of_a_split_or_subset_are_selected_by_path(source_fields: dict[str, str], expected: list[str]) -> None:
    names = ["main/dev.jsonl", "main/train.jsonl", "socratic/training_0.parquet", "train.csv", "train.md"]
    source = DatasetSource.model_validate({"name": "/data", **source_fields})

    selected = select_files([PurePosixPath(name) for name in names], source, spec_field=FIELD)

    assert [str(name) for name in selected] == expected


def test_the_error_for_a_missing_split_lists_the_existing_files() -> None:
    with pytest.raises(
        DatasetError, match=r"contains no .* file of subset main of split test; it contains main/train\.csv"
    ):
        select_files(
            [PurePosixPath("main/train.csv")], DatasetSource(name="d", subset="main", split="test"), spec_field=FIELD
        )


@pytest.mark.parametrize(
    ("spec_field", "names"),
    [
        (TRAIN_FIELD, ["data/train-00000-of-00002.jsonl", "data/train-00001-of-00002.jsonl"]),
        (EVAL_FIELD, ["data/test-00000-of-00001.jsonl"]),
    ],
)
def test_only_the_default_split_of_a_hub_dataset_is_downloaded(
    hub: FakeHub, tmp_path: Path, spec_field: str, names: list[str]
) -> None:
    files = find_files(
        DatasetSource(name="acme/rows"), build_download_settings(tmp_path), spec_field=f"{spec_field}[0].name"
    )

    folder = tmp_path / f"acme--rows@{SHA}"
    assert [str(file.relative_to(folder)) for file in files] == names
    assert all(file.read_bytes() == ROWS for file in files)
    assert not (folder / "README.md").exists()


def test_a_dataset_is_downloaded_once_for_all_ranks_and_attempts_of_a_job(hub: FakeHub, tmp_path: Path) -> None:
    source = DatasetSource(name="acme/rows", split="test")
    first = find_files(source, build_download_settings(tmp_path), spec_field=FIELD)
    request_count = len(hub.requested_paths)

    hub.datasets["acme/rows"]["data/test-00001-of-00001.jsonl"] = ROWS
    assert find_files(source, build_download_settings(tmp_path), spec_field=FIELD) == first
    assert find_files(source, build_download_settings(tmp_path, writes=False), spec_field=FIELD) == first
    assert len(hub.requested_paths) == request_count
    assert len(find_files(source, build_download_settings(tmp_path, job="another"), spec_field=FIELD)) == 2


def test_deleted_files_of_a_dataset_are_downloaded_again_at_the_same_commit(hub: FakeHub, tmp_path: Path) -> None:
    source = DatasetSource(name="acme/rows", split="train")
    files = find_files(source, build_download_settings(tmp_path), spec_field=FIELD)
    files[1].unlink()
    hub.requested_paths.clear()

    with pytest.raises(HubUnavailable):
        find_files(source, build_download_settings(tmp_path, writes=False), spec_field=FIELD)
    assert find_files(source, build_download_settings(tmp_path), spec_field=FIELD) == files

    assert files[1].read_bytes() == ROWS
    assert f"/api/datasets/acme/rows/revision/{SHA}" in hub.requested_paths


@pytest.mark.parametrize("content", ["damaged", "outside", "with dots"])
def test_a_list_of_files_that_is_damaged_or_names_other_folders_is_not_used(
    hub: FakeHub, tmp_path: Path, content: str
) -> None:
    source, downloads = DatasetSource(name="acme/rows", split="test"), build_download_settings(tmp_path / "hub")
    files = find_files(source, downloads, spec_field=FIELD)
    (tmp_path / "secret.jsonl").write_text("{}")
    (list_file,) = downloads.folder.glob("*.json")
    other = tmp_path / "hub/../secret.jsonl" if content == "with dots" else tmp_path / "secret.jsonl"
    list_file.write_text("[" if content == "damaged" else json.dumps([str(other)]))

    assert find_files(source, downloads, spec_field=FIELD) == files


@pytest.mark.parametrize("folder", [f"acme--rows@{SHA}", f"acme--rows@{SHA}/data"])
def test_no_dataset_is_downloaded_through_a_planted_link(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str
) -> None:
    link = plant_link(tmp_path, monkeypatch, folder)

    with pytest.raises(OutputError, match=f"{link} is a link"):
        find_files(DatasetSource(name="acme/rows"), build_download_settings(tmp_path / "hub"), spec_field=FIELD)

    assert list((tmp_path / "private").iterdir()) == []


def plant_link(mount: Path, monkeypatch: pytest.MonkeyPatch, folder: str) -> Path:
    """Create a link in place of a folder for downloads, and return it."""
    monkeypatch.setenv("FINETUNE_CACHE_DIR", str(mount / "cache"))
    link = mount / "hub" / folder
    (mount / "private").mkdir()
    link.parent.mkdir(parents=True)
    link.symlink_to(mount / "private")
    return link


def test_waiting_for_the_download_by_another_rank_times_out(tmp_path: Path) -> None:
    with pytest.raises(HubUnavailable, match=r'did not download "acme/rows" .* spec\.training\.ddpTimeout'):
        find_files(DatasetSource(name="acme/rows"), build_download_settings(tmp_path, writes=False), spec_field=FIELD)


def test_a_missing_hub_dataset_raises_a_dataset_error(hub: FakeHub, tmp_path: Path) -> None:
    with pytest.raises(
        DatasetError, match=r'train\[0\]\.name: "acme/none" is neither an existing path nor a dataset on the Hub'
    ):
        find_files(DatasetSource(name="acme/none"), build_download_settings(tmp_path), spec_field=FIELD)


def test_a_full_disk_is_not_reported_as_a_hub_failure(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail_with_full_disk(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(source_files, "snapshot_download", fail_with_full_disk)

    with pytest.raises(DiskFull, match="is full"):
        find_files(DatasetSource(name="acme/rows"), build_download_settings(tmp_path), spec_field=FIELD)


def test_a_hub_without_connection_is_retryable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source_files, "HfApi", lambda: HfApi(endpoint="http://127.0.0.1:9"))

    with pytest.raises(HubUnavailable, match=r'dataset "acme/rows" could not be downloaded from the Hub'):
        find_files(DatasetSource(name="acme/rows"), build_download_settings(tmp_path), spec_field=FIELD)


def test_a_hub_server_error_is_retryable(hub: FakeHub, tmp_path: Path) -> None:
    hub.error_status = 501  # HTTP status code that the Hub client does not retry

    with pytest.raises(HubUnavailable, match=r'dataset "acme/rows" could not be downloaded from the Hub'):
        find_files(DatasetSource(name="acme/rows"), build_download_settings(tmp_path), spec_field=FIELD)


@pytest.fixture
def modelscope(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeModelScope]:
    with serve_modelscope() as hub:
        hub.datasets[MODELSCOPE_ID] = FakeRepository()
        hub.datasets[MODELSCOPE_ID].push("1" * 40, dict(HUB_FILES))
        monkeypatch.setenv("MODELSCOPE_ENDPOINT", hub.address)
        monkeypatch.setenv("HOME", str(tmp_path))
        yield hub


def find_modelscope_files(folder: Path, *, job: str = "job", **fields: str) -> tuple[Path, ...]:
    source = DatasetSource.model_validate({"name": MODELSCOPE_ID, "hub": "modelscope", **fields})
    return find_files(source, build_download_settings(folder, job=job), spec_field=FIELD)


def test_a_dataset_on_modelscope_is_downloaded_once_for_all_attempts_of_a_job(
    modelscope: FakeModelScope, tmp_path: Path
) -> None:
    files = find_modelscope_files(tmp_path, name=f"{MODELSCOPE_ID}#1000")
    request_count = len(modelscope.requests)
    modelscope.datasets[MODELSCOPE_ID].push("2" * 40, {"data/train.jsonl": ROWS})

    assert find_modelscope_files(tmp_path, name=f"{MODELSCOPE_ID}#1000") == files
    assert len(modelscope.requests) == request_count
    assert [file.name for file in files] == ["train-00000-of-00002.jsonl", "train-00001-of-00002.jsonl"]
    assert [file.read_bytes() for file in files] == [ROWS, ROWS]
    assert [file.name for file in find_modelscope_files(tmp_path, job="another")] == ["train.jsonl"]


def test_no_file_of_modelscope_is_downloaded_through_a_planted_link(
    modelscope: FakeModelScope, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = find_modelscope_files(tmp_path / "another")[0].relative_to(tmp_path / "another").parent
    link = plant_link(tmp_path, monkeypatch, str(folder))

    with pytest.raises(OutputError, match=f"{link} is a link"):
        find_modelscope_files(tmp_path / "hub")

    assert list((tmp_path / "private").iterdir()) == []


def test_deleted_files_of_modelscope_are_downloaded_again_from_the_same_list(
    modelscope: FakeModelScope, tmp_path: Path
) -> None:
    files = find_modelscope_files(tmp_path)
    files[1].unlink()
    modelscope.datasets[MODELSCOPE_ID].push("2" * 40, {"data/train.jsonl": ROWS})
    assert find_modelscope_files(tmp_path, job="another") != files

    assert find_modelscope_files(tmp_path) == files
    assert files[1].read_bytes() == ROWS


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"name": "acme/none"}, r'"acme/none" is neither an existing path nor a dataset on ModelScope'),
        ({"revision": "v9"}, r"nor a dataset of revision v9 on ModelScope .* correct name or revision"),
        ({"split": "dev"}, r"contains no .* file of split dev"),
    ],
    ids=["name", "revision", "split"],
)
def test_a_missing_dataset_on_modelscope_raises_a_dataset_error(
    modelscope: FakeModelScope, tmp_path: Path, fields: dict[str, str], message: str
) -> None:
    with pytest.raises(DatasetError, match=message):
        find_modelscope_files(tmp_path, **fields)


def test_modelscope_without_connection_is_retryable(
    modelscope: FakeModelScope, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_legacy_api, "REPO_TREE_PAGE_MAX_ATTEMPTS", 1)
    monkeypatch.setenv("MODELSCOPE_ENDPOINT", "http://127.0.0.1:9")

    with pytest.raises(HubUnavailable, match="could not be read from ModelScope"):
        find_modelscope_files(tmp_path)
