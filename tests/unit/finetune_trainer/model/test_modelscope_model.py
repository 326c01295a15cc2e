"""Tests of models on ModelScope: revision, files, errors, and use without a network."""

import dataclasses
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from modelscope_hub import HubApi, _legacy_api
from peft import PeftConfig

from finetune_api.v1alpha1.job import TrainerSpec
from finetune_api.v1alpha1.model_source import ModelSource
from finetune_trainer.errors import DiskFull, HubUnavailable, ModelNotFound
from finetune_trainer.memory import __main__ as memory_command
from finetune_trainer.model.download import download_model
from finetune_trainer.model.load import describe_model, load_model
from finetune_trainer.model.revision import pin_revision
from finetune_trainer.once_per_job import DownloadSettings
from testing.fakes.downloads import build_download_settings
from testing.fakes.modelscope import TOKEN, FakeModelScope, FakeRepository, serve_modelscope
from testing.models import tiny_text

FIRST, SECOND = "1" * 40, "2" * 40
NAME = "Qwen/Qwen2.5-7B-Instruct"
SOURCE = ModelSource(name=NAME, hub="modelscope")
FILES = {
    "config.json": b"{}",
    "tokenizer.json": b"tokens",
    "model-00001-of-00002.safetensors": b"first",
    "model-00002-of-00002.safetensors": b"second",
    "consolidated.safetensors": b"all",
    "pytorch_model.bin": b"pickled",
    "README.md": b"# Model",
    "figures/loss.png": b"image",
}
READ_FILES = {"config.json", "tokenizer.json", "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeModelScope]:
    """Return a ModelScope whose model has the first commit; the client has no delays between attempts."""
    with serve_modelscope() as hub:
        hub.models[NAME] = FakeRepository()
        hub.models[NAME].push(FIRST, dict(FILES))
        set_endpoint(monkeypatch, hub.address)
        monkeypatch.setenv("HOME", str(tmp_path))
        monkeypatch.setattr(_legacy_api, "REPO_TREE_PAGE_MAX_ATTEMPTS", 1)
        yield hub


def set_endpoint(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    monkeypatch.setenv("MODELSCOPE_ENDPOINT", address)


@pytest.fixture
def downloads(tmp_path: Path) -> DownloadSettings:
    return build_download_settings(tmp_path / "job")


def start_another_job(downloads: DownloadSettings) -> DownloadSettings:
    """Return the settings of another job on the same claim."""
    return dataclasses.replace(downloads, job_uid="another")


def list_downloaded_paths(hub: FakeModelScope) -> list[str]:
    return sorted(path for _, path in hub.downloads)


def test_the_writer_downloads_each_file_that_transformers_reads_once(
    hub: FakeModelScope, downloads: DownloadSettings
) -> None:
    pinned = pin_revision(SOURCE, downloads)
    local = download_model(pinned, downloads)

    assert (pinned.name, pinned.revision) == (NAME, FIRST)
    assert list_downloaded_paths(hub) == sorted(READ_FILES)
    assert local.revision is None
    for name in READ_FILES:
        assert (Path(local.name) / name).read_bytes() == FILES[name]
    request_count = len(hub.requests)

    reader = dataclasses.replace(downloads, is_writer=False)
    assert download_model(pin_revision(SOURCE, reader), reader) == local
    assert download_model(pinned, start_another_job(downloads)) == local
    assert len(hub.requests) == request_count


def test_pickled_weights_are_downloaded_if_there_are_no_others(
    hub: FakeModelScope, downloads: DownloadSettings
) -> None:
    hub.models[NAME].push(SECOND, {"config.json": b"{}", "pytorch_model.bin": b"1", "training_args.bin": b"2"})

    download_model(pin_revision(SOURCE, downloads), downloads)

    assert list_downloaded_paths(hub) == ["config.json", "pytorch_model.bin"]


def test_a_later_attempt_loads_the_files_of_the_first_after_master_moved(
    hub: FakeModelScope, downloads: DownloadSettings
) -> None:
    pin_revision(SOURCE, downloads)
    hub.models[NAME].push(SECOND, {**FILES, "config.json": b"changed"})

    local = download_model(pin_revision(SOURCE, downloads), downloads)
    other_job = start_another_job(downloads)
    other = download_model(pin_revision(SOURCE, other_job), other_job)

    assert (Path(local.name) / "config.json").read_bytes() == b"{}"
    assert (Path(other.name) / "config.json").read_bytes() == b"changed"
    assert pin_revision(SOURCE, other_job).revision == SECOND


def test_a_deletion_between_two_attempts_does_not_change_the_files_of_a_job(
    hub: FakeModelScope, downloads: DownloadSettings
) -> None:
    pinned = pin_revision(SOURCE, downloads)
    without_tokenizer = {name: content for name, content in FILES.items() if name != "tokenizer.json"}
    hub.models[NAME].push(SECOND, without_tokenizer)  # no remaining file was changed by this commit
    pin_revision(SOURCE, start_another_job(downloads))

    local = download_model(pinned, downloads)

    assert (Path(local.name) / "tokenizer.json").is_file()


@pytest.mark.parametrize("revision", ["v1.0", FIRST], ids=["tag", "commit"])
def test_a_tag_or_commit_is_resolved_instead_of_master(
    hub: FakeModelScope, downloads: DownloadSettings, revision: str
) -> None:
    hub.models[NAME].push(SECOND, {**FILES, "config.json": b"changed"})
    hub.models[NAME].refs["v1.0"] = FIRST

    pinned = pin_revision(SOURCE.model_copy(update={"revision": revision}), downloads)

    assert pinned.revision == FIRST
    assert (Path(download_model(pinned, downloads).name) / "config.json").read_bytes() == b"{}"


def test_each_file_is_read_from_the_commit_that_changed_it(hub: FakeModelScope, downloads: DownloadSettings) -> None:
    hub.models[NAME].push(SECOND, {**FILES, "config.json": b"changed"})

    download_model(pin_revision(SOURCE, downloads), downloads)

    assert ((SECOND, "config.json") in hub.downloads, (FIRST, "tokenizer.json") in hub.downloads) == (True, True)


def test_a_file_that_was_deleted_from_the_claim_is_downloaded_by_the_next_attempt(
    hub: FakeModelScope, downloads: DownloadSettings
) -> None:
    pinned = pin_revision(SOURCE, downloads)
    local = download_model(pinned, downloads)
    (Path(local.name) / "tokenizer.json").unlink()
    hub.downloads.clear()

    download_model(pinned, dataclasses.replace(downloads, job_uid="job 1"))

    assert list_downloaded_paths(hub) == ["tokenizer.json"]


@pytest.mark.parametrize("failure", ["server error", "no connection"])
def test_without_modelscope_a_job_uses_the_files_on_the_claim(
    hub: FakeModelScope, downloads: DownloadSettings, monkeypatch: pytest.MonkeyPatch, failure: str
) -> None:
    local = download_model(pin_revision(SOURCE, downloads), downloads)
    hub.error_status = 501
    if failure == "no connection":
        set_endpoint(monkeypatch, "http://127.0.0.1:9")

    other_job = start_another_job(downloads)

    assert download_model(pin_revision(SOURCE, other_job), other_job) == local


def test_without_modelscope_and_files_on_the_claim_the_error_is_retryable(
    hub: FakeModelScope, downloads: DownloadSettings
) -> None:
    hub.error_status = 501

    with pytest.raises(HubUnavailable, match=f'"{NAME}" could not be read from ModelScope'):
        pin_revision(SOURCE, downloads)

    assert not list(downloads.folder.glob("*.json"))


def test_a_file_with_other_content_than_listed_is_not_used(
    hub: FakeModelScope, downloads: DownloadSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "sleep", lambda _seconds: None)
    monkeypatch.setattr("modelscope_hub._download.DOWNLOAD_INTEGRITY_RETRY_BACKOFF", 0)
    pinned = pin_revision(SOURCE, downloads)
    hub.models[NAME].commits[FIRST]["tokenizer.json"] = b"forged"

    with pytest.raises(HubUnavailable, match=r"could not be downloaded from ModelScope: tokenizer\.json"):
        download_model(pinned, downloads)

    assert not list(downloads.folder.rglob("tokenizer.json"))


def test_a_full_disk_is_not_a_failure_of_modelscope(
    hub: FakeModelScope, downloads: DownloadSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fill_disk(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    pinned = pin_revision(SOURCE, downloads)
    monkeypatch.setattr(HubApi, "download_repo", fill_disk)

    with pytest.raises(DiskFull):
        download_model(pinned, downloads)


def test_a_private_model_needs_the_token(
    hub: FakeModelScope, downloads: DownloadSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.models[NAME].is_private = True
    with pytest.raises(ModelNotFound, match=r"set MODELSCOPE_API_TOKEN from a Secret"):
        pin_revision(SOURCE, downloads)

    monkeypatch.setenv("MODELSCOPE_API_TOKEN", TOKEN)

    assert pin_revision(SOURCE, downloads).revision == FIRST


def test_a_missing_model_revision_or_config_is_a_user_error(hub: FakeModelScope, downloads: DownloadSettings) -> None:
    hub.models["acme/notes"] = FakeRepository()
    hub.models["acme/notes"].push(FIRST, {"README.md": b"# Notes"})

    with pytest.raises(
        ModelNotFound, match=r'spec\.model\.name: "acme/none" is neither a path nor a model on ModelScope'
    ):
        pin_revision(ModelSource(name="acme/none", hub="modelscope"), downloads)
    with pytest.raises(ModelNotFound, match=r'spec\.model\.revision: "v9" is no branch, tag or commit of model'):
        pin_revision(SOURCE.model_copy(update={"revision": "v9"}), downloads)
    with pytest.raises(ModelNotFound, match=r'spec\.model\.name: "acme/notes" on ModelScope has no config\.json'):
        download_model(pin_revision(ModelSource(name="acme/notes", hub="modelscope"), downloads), downloads)


@pytest.mark.parametrize(
    "changed_fields",
    [{"Size": None, "Sha256": None}, {"Revision": "", "CommittedDate": "2026-11-27T08:00:00Z"}],
    ids=["no size and hash", "no commit"],
)
def test_incomplete_entries_of_a_list_are_accepted(
    hub: FakeModelScope, downloads: DownloadSettings, changed_fields: dict[str, Any]
) -> None:
    hub.changed_fields = changed_fields

    local = download_model(pin_revision(SOURCE, downloads), downloads)
    hub.models[NAME].push(SECOND, {**FILES, "config.json": b"changed"})

    assert {file.name for file in Path(local.name).iterdir()} == READ_FILES
    next_attempt = dataclasses.replace(downloads, job_uid="job 1")
    assert download_model(pin_revision(SOURCE, downloads), next_attempt) == local


@pytest.mark.parametrize("changed_fields", [{"Size": "large"}, {"Type": "tree"}], ids=["invalid", "empty"])
def test_a_list_without_valid_files_is_retryable(
    hub: FakeModelScope, downloads: DownloadSettings, changed_fields: dict[str, Any]
) -> None:
    hub.changed_fields = changed_fields

    with pytest.raises(HubUnavailable, match=rf'ModelScope returned (no files|an invalid list of files) of "{NAME}"'):
        pin_revision(SOURCE, downloads)


def test_a_file_outside_the_repository_is_not_downloaded(hub: FakeModelScope, downloads: DownloadSettings) -> None:
    hub.models[NAME].push(SECOND, {"config.json": b"{}", "../evil.json": b"1", "/evil.json": b"2"})

    download_model(pin_revision(SOURCE, downloads), downloads)

    assert list_downloaded_paths(hub) == ["config.json"]


@pytest.mark.parametrize(
    "change",
    [lambda value: value["files"][0].update(path="../../../outside.json"), lambda value: value.update(commit="../x")],
)
def test_a_stored_list_with_a_path_outside_of_the_repository_is_not_used(
    hub: FakeModelScope, downloads: DownloadSettings, change: Callable[[dict[str, Any]], object]
) -> None:
    pinned = pin_revision(SOURCE, downloads)
    for file in downloads.modelscope_cache.glob("files-*.json"):
        value = json.loads(file.read_text())
        change(value)
        file.write_text(json.dumps(value))

    local = download_model(pinned, downloads)

    assert {file.name for file in Path(local.name).iterdir()} == READ_FILES
    assert not list(downloads.folder.parent.rglob("*outside*"))


def test_files_without_a_checksum_are_named(
    hub: FakeModelScope, downloads: DownloadSettings, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.changed_fields = {"Sha256": None}

    download_model(pin_revision(SOURCE, downloads), downloads)

    assert f"{NAME}: ModelScope lists no checksum of {len(READ_FILES)} files: " in capsys.readouterr().out


@pytest.mark.parametrize("suffix", ["/../../../outside", "/repo/files?x=/../../../../../outside", "#x", ""])
def test_a_model_name_that_is_no_id_reaches_neither_another_folder_nor_another_path_of_the_server(
    hub: FakeModelScope, downloads: DownloadSettings, tmp_path: Path, suffix: str
) -> None:
    hub.changed_fields = {"Size": None, "Sha256": None}
    source = ModelSource(name=f"{NAME}{suffix}" if suffix else "Qwen", hub="modelscope")

    for use in (pin_revision, download_model):
        with pytest.raises(ModelNotFound, match="expected an id OWNER/NAME"):
            use(source, downloads)

    assert hub.requests == []
    assert list(tmp_path.rglob("*outside*")) == []


def push_tiny_model(hub: FakeModelScope, folder: Path) -> None:
    tokenizer = tiny_text.build_tokenizer()
    tokenizer.save_pretrained(folder)
    tiny_text.build_model(len(tokenizer), seed=1).save_pretrained(folder)
    hub.models[NAME].push(SECOND, {file.name: file.read_bytes() for file in folder.iterdir()})


def build_spec(**model_fields: Any) -> dict[str, Any]:
    return {
        "model": {"name": NAME, "hub": "modelscope", **model_fields},
        "dataset": {"train": [{"name": "/rows"}]},
        "sft": {},
        "lora": {"r": 2},
        "output": {"persistentVolumeClaim": {"claimName": "c"}},
    }


def test_the_result_names_the_model_by_its_id(hub: FakeModelScope, downloads: DownloadSettings, tmp_path: Path) -> None:
    push_tiny_model(hub, tmp_path / "model")
    spec = TrainerSpec.model_validate(build_spec())

    local = download_model(pin_revision(spec.model, downloads), downloads)
    model = load_model(spec, describe_model(local, torch.device("cpu")))
    model.save_pretrained(tmp_path / "result")  # type: ignore[operator]

    result = PeftConfig.from_pretrained(tmp_path / "result")
    assert (result.base_model_name_or_path, result.revision) == (NAME, None)


def test_memory_is_forecast_without_a_download_of_the_weights(
    hub: FakeModelScope, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_command, "hide_unused_libraries", lambda _: None)  # other tests use these libraries
    push_tiny_model(hub, tmp_path / "model")
    spec_file = tmp_path / "spec.json"
    spec_file.write_text(json.dumps({**build_spec(), "dataset": {"train": [{"name": "/rows"}], "maxLength": 64}}))

    assert memory_command.build_forecast_report(spec_file, None)["parameters"] > 0
    assert "config.json" in list_downloaded_paths(hub)
    assert not any(path.endswith(".safetensors") for path in list_downloaded_paths(hub))
