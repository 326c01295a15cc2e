"""Tests publishing a result on ModelScope, and the errors for failed requests."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from modelscope_hub import HubApi

from finetune_api.v1alpha1.output import PushToHub
from finetune_trainer.errors import HubUnavailable, InvalidSpec
from finetune_trainer.hubs import create_repository, modelscope, upload
from testing.fakes.modelscope import TOKEN, FakeModelScope, serve_modelscope

READ_ONLY = "ms-may-read"
TARGET = PushToHub(hub="modelscope", repo="acme/support")


@pytest.fixture(autouse=True)
def skip_retry_delays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disable the retry delays of the client, which add up to one minute."""
    monkeypatch.setattr(time, "sleep", lambda _seconds: None)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeModelScope]:
    with serve_modelscope() as hub:
        monkeypatch.setattr(modelscope, "HubApi", lambda: HubApi(endpoint=hub.address, token=TOKEN))
        yield hub


@pytest.mark.parametrize(("is_private", "visibility"), [(True, 1), (False, 5)])
def test_a_repository_is_created_once_with_the_specified_visibility(
    hub: FakeModelScope, is_private: bool, visibility: int
) -> None:
    create_repository(PushToHub(hub="modelscope", repo="acme/support", private=is_private))
    hub.repositories["acme/support"]["README.md"] = b"# Existing"

    create_repository(TARGET)

    assert hub.repositories == {"acme/support": {"README.md": b"# Existing"}}
    assert [(created["Visibility"], created["License"]) for created in hub.created_repositories] == [
        (visibility, "Other")
    ]


def test_the_files_of_a_result_are_uploaded_without_others(hub: FakeModelScope, tmp_path: Path) -> None:
    files = {
        "adapter_model.safetensors": bytes(range(256)),
        "merged/config.json": b"{}",
        "README.md": b"---\nlibrary_name: peft\n---\n# Support\n",
    }
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    (tmp_path / "merged/other.json").write_text("written by somebody else")
    create_repository(TARGET)

    url = upload(TARGET, tmp_path, title="default/first", files=tuple(files))

    assert url == f"{hub.address}/models/acme/support"
    assert hub.repositories["acme/support"] == files
    assert hub.messages == ["Result of default/first (batch 1/1)"]  # the client appends the batch number
    assert {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()} == {
        *files,
        "merged/other.json",
    }


@pytest.mark.parametrize("repository_exists", [False, True], ids=["new repository", "existing repository"])
def test_a_token_without_write_access_raises_invalid_spec(
    hub: FakeModelScope, monkeypatch: pytest.MonkeyPatch, repository_exists: bool
) -> None:
    if repository_exists:
        create_repository(TARGET)
    monkeypatch.setattr(modelscope, "HubApi", lambda: HubApi(endpoint=hub.address, token=READ_ONLY))

    with pytest.raises(InvalidSpec, match=r'ModelScope rejected "acme/support" .*MODELSCOPE_API_TOKEN') as raised:
        create_repository(TARGET)

    assert READ_ONLY not in str(raised.value)


def test_a_hub_server_error_is_retryable(hub: FakeModelScope, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    create_repository(TARGET)
    hub.error_status = 501  # HTTP status code that the client does not retry

    with pytest.raises(HubUnavailable, match=r'publishing "acme/support" on ModelScope failed'):
        upload(TARGET, tmp_path, title="default/first", files=("config.json",))


def test_an_unreachable_hub_is_retryable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modelscope, "HubApi", lambda: HubApi(endpoint="http://127.0.0.1:9", token=TOKEN))

    with pytest.raises(HubUnavailable, match=r"publishing .* failed"):
        create_repository(TARGET)
