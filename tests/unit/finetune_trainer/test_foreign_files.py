"""Tests that links in folders of others lead to no other file of the pod."""

import json
import os
from pathlib import Path

import pytest
import torch
from huggingface_hub import snapshot_download
from huggingface_hub.utils._shared_blobs import publish_blob_to_shared_store

from finetune_api.v1alpha1.model_source import ModelSource
from finetune_trainer.data_sources.readers import read_rows
from finetune_trainer.errors import DatasetError, ModelError
from finetune_trainer.foreign_files import ForbiddenFile, copy_model_files, open_data_file, open_foreign
from finetune_trainer.model.load import describe_model
from finetune_trainer.model.save import save_tokenizer_and_processors
from testing.fakes.hub import FakeModel, serve_hub, set_endpoint
from testing.models import tiny_text

CPU = torch.device("cpu")
COMMIT = "1" * 40


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a model with a tokenizer and without weights."""
    tokenizer = tiny_text.build_tokenizer()
    tokenizer.save_pretrained(tmp_path / "model")
    tiny_text.build_model(len(tokenizer)).config.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.parametrize(
    ("name", "target"),
    [
        ("additional_chat_templates/tool_use.jinja", "/proc/self/environ"),
        ("chat_template.jinja", "/proc/self/environ"),
        ("generation_config.json", "../key.json"),
        ("special_tokens_map.json", "../key.json"),
        ("model.safetensors", "../key.json"),
        ("vocab.txt", "/dev/zero"),
    ],
)
def test_a_link_that_leaves_the_folder_of_a_model_is_an_error(folder: Path, name: str, target: str) -> None:
    (folder.parent / "key.json").write_text('{"private_key": "secret"}')
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(target)

    with pytest.raises(ModelError, match=rf"{name} leads to .*, from which the trainer reads nothing"):
        describe_model(ModelSource(name=str(folder)), CPU)


def test_a_model_is_saved_without_files_that_were_replaced_after_it_was_read(folder: Path, tmp_path: Path) -> None:
    description = describe_model(ModelSource(name=str(folder)), CPU)
    (folder / "chat_template.json").symlink_to("/proc/self/environ")
    (tmp_path / "result").mkdir()

    save_tokenizer_and_processors(description, tmp_path / "result")

    assert not (tmp_path / "result" / "chat_template.json").exists()


@pytest.mark.parametrize("with_xet", [False, True])
def test_the_links_of_the_hub_cache_are_followed(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, with_xet: bool
) -> None:
    cache = tmp_path / "hub"
    with serve_hub() as hub:
        hub.models["acme/tiny"] = FakeModel()
        hub.models["acme/tiny"].push(COMMIT, folder)
        set_endpoint(monkeypatch, hub.address)
        snapshot = Path(snapshot_download("acme/tiny", revision=COMMIT, cache_dir=cache))
    for blob in (cache / "models--acme--tiny" / "blobs").iterdir() if with_xet else ():  # as after a download by xet
        size = blob.stat().st_size
        assert publish_blob_to_shared_store(
            blob_path=str(blob), xet_hash=blob.name, cache_dir=cache, expected_size=size
        )
        assert blob.is_symlink()

    assert (snapshot / "config.json").is_symlink()
    assert describe_model(ModelSource(name=str(snapshot)), CPU).tokenizer("a")
    (snapshot / "chat_template.jinja").unlink(missing_ok=True)
    (snapshot / "chat_template.jinja").symlink_to(tmp_path / "other.jinja")
    (tmp_path / "other.jinja").write_text("secret")
    with pytest.raises(ModelError, match=r"chat_template\.jinja leads to"):
        describe_model(ModelSource(name=str(snapshot)), CPU)


def test_the_layout_of_a_config_map_and_a_link_as_the_path_of_the_spec_are_followed(folder: Path) -> None:
    data = folder / "..2026_11_29"
    data.mkdir()
    for file in [path for path in folder.iterdir() if path.is_file()]:
        file.rename(data / file.name)
        file.symlink_to(f"..data/{file.name}")
    (folder / "..data").symlink_to(data.name)
    (folder.parent / "link").symlink_to(folder)

    assert describe_model(ModelSource(name=str(folder.parent / "link")), CPU).tokenizer("a")


def test_files_that_are_not_read_are_neither_checked_nor_copied(folder: Path) -> None:
    (folder / "README.md").symlink_to("/proc/self/environ")
    (folder / ".git").mkdir()

    copy = copy_model_files(folder, "model")
    assert sorted(os.listdir(copy)) == sorted({path.name for path in folder.iterdir()} - {"README.md", ".git"})


def test_links_to_missing_files_are_left_out(folder: Path) -> None:
    """A loader that prefers safetensors does not need other weights."""
    (folder / "pytorch_model.bin").symlink_to("missing")

    assert "pytorch_model.bin" not in os.listdir(copy_model_files(folder, "model"))


@pytest.fixture
def pod(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with the volumes `data`, `other` and `secret` of a job, and with `private`, which is none."""
    for name in ("data", "other", "secret", "private", "output"):
        (tmp_path / name).mkdir()
    volumes = [
        {"mountPath": str(tmp_path / "data"), "persistentVolumeClaim": {"claimName": "a"}},
        {"mountPath": str(tmp_path / "other"), "persistentVolumeClaim": {"claimName": "b"}},
        {"mountPath": str(tmp_path / "secret"), "secret": {"secretName": "c"}},
    ]
    (tmp_path / "job.json").write_text(json.dumps({"volumes": volumes}))
    monkeypatch.setenv("FINETUNE_CONFIG", str(tmp_path / "job.json"))
    monkeypatch.setenv("FINETUNE_CACHE_DIR", str(tmp_path / "output" / "cache"))
    return tmp_path


def test_links_of_a_dataset_lead_to_data_volumes_only(pod: Path) -> None:
    for name in ("other", "secret", "private"):
        (pod / name / "a.jpg").write_bytes(b"content")
        (pod / "data" / f"{name}.jpg").symlink_to(pod / name / "a.jpg")

    assert open_data_file(pod / "data" / "other.jpg").read() == b"content"
    for name in ("secret", "private"):
        with pytest.raises(ForbiddenFile, match=rf"{name}\.jpg leads to .*{name}/a\.jpg"):
            open_data_file(pod / "data" / f"{name}.jpg")
    with pytest.raises(ForbiddenFile):
        open_data_file(pod / "secret" / "a.jpg")


def test_rows_of_a_system_file_are_an_error(pod: Path) -> None:
    (pod / "data" / "rows.jsonl").symlink_to("/proc/self/environ")

    with pytest.raises(DatasetError, match=r"rows\.jsonl leads to /proc/"):
        list(read_rows(pod / "data" / "rows.jsonl"))


def test_a_pipe_is_refused_without_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "rows.jsonl")

    with pytest.raises(ForbiddenFile):
        open_foreign(tmp_path / "rows.jsonl")


def test_a_folder_is_reported_as_one(tmp_path: Path) -> None:
    with pytest.raises(IsADirectoryError, match=str(tmp_path)):
        open_foreign(tmp_path)
