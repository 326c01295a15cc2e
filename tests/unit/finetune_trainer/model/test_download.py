"""Tests that the files of a model on the Hub are downloaded once for all ranks."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from types import SimpleNamespace

import pytest
from huggingface_hub import constants, try_to_load_from_cache
from huggingface_hub.utils import _http

from finetune_api.v1alpha1.base import HubName
from finetune_api.v1alpha1.model_source import ModelSource
from finetune_trainer.distributed.rank_context import RankContext
from finetune_trainer.errors import DiskFull, ModelNotFound, OutputError
from finetune_trainer.model.download import choose_model_downloads, download_model
from finetune_trainer.once_per_job import DownloadSettings
from testing.fakes.downloads import NO_DOWNLOADS, build_download_settings
from testing.fakes.hub import FakeHub, FakeModel, serve_hub, set_endpoint

COMMIT = "1" * 40
NAME = "acme/base"
SOURCE = ModelSource(name=NAME, revision=COMMIT)
SMALL_FILES = {"config.json", "tokenizer.model", "chat_template.jinja", "merges.txt"}
SHARDS = {"model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    with serve_hub() as hub:
        put_model(hub, *SMALL_FILES, *SHARDS, "pytorch_model.bin", "consolidated.safetensors", "README.md")
        set_endpoint(monkeypatch, hub.address)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache" / "huggingface"))
        yield hub


def put_model(hub: FakeHub, *files: str) -> None:
    hub.models[NAME] = FakeModel(commits={COMMIT: {file: file.encode() for file in files}}, refs={"main": COMMIT})


def list_downloaded_files(hub: FakeHub) -> list[str]:
    return sorted(PurePosixPath(path).name for path in hub.downloaded_paths if "/resolve/" in path)


@pytest.fixture
def downloads(tmp_path: Path) -> DownloadSettings:
    return build_download_settings(tmp_path / "job")


def test_the_writer_downloads_each_file_that_transformers_reads_once(hub: FakeHub, downloads: DownloadSettings) -> None:
    download_model(SOURCE, downloads)
    assert list_downloaded_files(hub) == sorted(SMALL_FILES | SHARDS)
    request_count = len(hub.requested_paths)

    download_model(SOURCE, dataclasses.replace(downloads, is_writer=False))
    download_model(SOURCE, dataclasses.replace(downloads, job_uid="another"))

    assert len(hub.requested_paths) == request_count
    for file in SMALL_FILES | SHARDS:
        assert isinstance(try_to_load_from_cache(NAME, file, revision=COMMIT), str)


@pytest.mark.parametrize("folder", ["", "blobs", f"snapshots/{COMMIT}"])
def test_no_file_is_downloaded_through_a_planted_link(
    hub: FakeHub, downloads: DownloadSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str
) -> None:
    monkeypatch.setenv("FINETUNE_CACHE_DIR", str(tmp_path / "cache"))
    link = Path(constants.HF_HUB_CACHE, "models--acme--base", folder)
    link.parent.mkdir(parents=True)
    (tmp_path / "private").mkdir()
    link.symlink_to(tmp_path / "private")

    with pytest.raises(OutputError, match=f"{link} is a link"):
        download_model(SOURCE, downloads)

    assert list((tmp_path / "private").iterdir()) == []


def test_pickled_weights_are_downloaded_if_there_are_no_others(hub: FakeHub, downloads: DownloadSettings) -> None:
    put_model(hub, "config.json", "pytorch_model.bin", "training_args.bin")

    download_model(SOURCE, downloads)

    assert list_downloaded_files(hub) == ["config.json", "pytorch_model.bin"]


@pytest.mark.parametrize("failure", ["offline mode", "server error", "no connection"])
def test_without_the_hub_the_loaders_decide(
    hub: FakeHub, downloads: DownloadSettings, monkeypatch: pytest.MonkeyPatch, failure: str
) -> None:
    hub.error_status = 501  # HTTP status code that the Hub client does not retry
    if failure == "offline mode":
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    if failure == "no connection":
        set_endpoint(monkeypatch, "http://127.0.0.1:9")
        monkeypatch.setattr(_http, "time", SimpleNamespace(sleep=lambda _: None))  # the client retries

    download_model(SOURCE, downloads)  # raises no error

    assert list_downloaded_files(hub) == []


def test_a_file_that_was_deleted_from_the_cache_is_downloaded_by_the_next_attempt(
    hub: FakeHub, downloads: DownloadSettings
) -> None:
    download_model(SOURCE, downloads)
    file = "model-00001-of-00002.safetensors"
    path = try_to_load_from_cache(NAME, file, revision=COMMIT)
    assert isinstance(path, str)
    Path(path).resolve().unlink()
    Path(path).unlink()
    hub.downloaded_paths.clear()

    download_model(SOURCE, dataclasses.replace(downloads, job_uid="job 1"))

    assert list_downloaded_files(hub) == [file]


def test_errors_of_the_download_name_the_field(hub: FakeHub, downloads: DownloadSettings) -> None:
    hub.models[NAME].is_gated = True

    with pytest.raises(ModelNotFound, match=r'spec\.model\.name: access to "acme/base" is gated'):
        download_model(SOURCE, downloads)


def test_a_full_disk_is_not_a_failure_of_the_hub(
    hub: FakeHub, downloads: DownloadSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fill_disk(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("finetune_trainer.model.download.snapshot_download", fill_disk)

    with pytest.raises(DiskFull):
        download_model(SOURCE, downloads)


def test_a_path_is_not_downloaded(tmp_path: Path) -> None:
    download_model(ModelSource(name=str(tmp_path)), NO_DOWNLOADS)


@pytest.mark.parametrize(
    ("hub_name", "cache", "local_rank", "rank", "is_writer"),
    [
        ("huggingface", "shared", 0, 0, True),
        ("huggingface", "shared", 0, 2, False),
        ("huggingface", "shared", 1, 1, False),
        ("huggingface", "of the node", 0, 2, True),
        ("huggingface", "of the node", 1, 3, False),
        ("modelscope", "of the node", 0, 0, True),
        ("modelscope", "of the node", 0, 2, False),
    ],
)
def test_one_rank_downloads_for_all_that_share_the_cache(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    hub_name: HubName,
    cache: str,
    local_rank: int,
    rank: int,
    is_writer: bool,
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / ("out/cache/hf" if cache == "shared" else "home")))
    context = RankContext.from_environment(
        {
            "RANK": str(rank),
            "LOCAL_RANK": str(local_rank),
            "WORLD_SIZE": "4",
            "LOCAL_WORLD_SIZE": "2",
            "FINETUNE_WORLD_SIZE": "4",
            "FINETUNE_CONFIG": "/config",
            "FINETUNE_OUTPUT": str(tmp_path / "out/job"),
            "FINETUNE_CACHE_DIR": str(tmp_path / "out/cache"),
            "FINETUNE_RUN_DIR": str(tmp_path / "run"),
            "FINETUNE_JOB_UID": "uid",
            "FINETUNE_NAMESPACE": "default",
            "FINETUNE_JOB": "job",
            "FINETUNE_ATTEMPT": "3",
        }
    )
    downloads = build_download_settings(tmp_path / "out/cache/hub", job="uid", writes=rank == 0)

    chosen = choose_model_downloads(ModelSource(name=NAME, hub=hub_name), context, downloads)

    assert chosen.is_writer is is_writer
    is_on_claim = cache == "shared" or hub_name == "modelscope"
    assert chosen.folder == tmp_path / ("out/cache/hub" if is_on_claim else "run")
    assert chosen.job_uid == "uid 3"
