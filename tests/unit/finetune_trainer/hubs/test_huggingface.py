"""Tests publishing a result on the Hugging Face Hub, and the errors for failed requests."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import HfApi

from finetune_api.v1alpha1.output import PushToHub
from finetune_trainer.card_marker import mark_generated
from finetune_trainer.errors import HubUnavailable, InvalidSpec
from finetune_trainer.hubs import create_repository, huggingface, upload
from testing.fakes.hub import TOKEN, FakeHub, serve_hub

READ_ONLY = "hf_may_read"
TARGET = PushToHub(repo="acme/support")


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    with serve_hub() as hub:
        monkeypatch.setattr(huggingface, "HfApi", lambda: HfApi(endpoint=hub.address, token=TOKEN))
        yield hub


@pytest.mark.parametrize(("is_private", "visibility"), [(True, "private"), (False, "public")])
def test_a_repository_is_created_once_with_the_specified_visibility(
    hub: FakeHub, is_private: bool, visibility: str
) -> None:
    create_repository(PushToHub(repo="acme/support", private=is_private))
    hub.repositories["acme/support"]["README.md"] = b"# Existing"

    create_repository(TARGET)

    assert hub.repositories == {"acme/support": {"README.md": b"# Existing"}}
    assert hub.visibility == {"acme/support": visibility}


def test_the_files_of_a_result_are_uploaded_without_others(hub: FakeHub, tmp_path: Path) -> None:
    (tmp_path / "merged").mkdir()
    (tmp_path / "merged/other.json").write_text("written by somebody else")
    (tmp_path / "adapter_model.safetensors").write_bytes(bytes(range(256)))
    (tmp_path / "merged/config.json").write_text("{}")
    (tmp_path / "README.md").write_text("---\nlibrary_name: peft\n---\n# Support\n")
    create_repository(TARGET)

    files = ("adapter_model.safetensors", "merged/config.json", "README.md")
    url = upload(TARGET, tmp_path, title="default/first", files=files)

    assert url == f"{hub.address}/acme/support/commit/1"
    assert hub.repositories["acme/support"] == {
        "adapter_model.safetensors": bytes(range(256)),
        "merged/config.json": b"{}",
        "README.md": b"---\nlibrary_name: peft\n---\n# Support\n",
    }
    assert hub.messages == ["Result of default/first"]


@pytest.mark.parametrize(
    ("existing", "is_replaced"),
    [
        pytest.param(mark_generated("# Earlier result\n"), True, id="generated"),
        pytest.param(mark_generated("# Earlier result\n").replace("Earlier", "My"), False, id="edited"),
        pytest.param("# My model\n", False, id="written by the user"),
    ],
)
def test_only_a_generated_card_of_the_repository_is_replaced(
    hub: FakeHub, tmp_path: Path, existing: str, is_replaced: bool
) -> None:
    (tmp_path / "README.md").write_text(mark_generated("# Result\n"))
    (tmp_path / "config.json").write_text("{}")
    create_repository(TARGET)
    hub.repositories["acme/support"]["README.md"] = existing.encode()

    upload(TARGET, tmp_path, title="default/first", files=("README.md", "config.json"))

    card = hub.repositories["acme/support"]["README.md"].decode()
    assert card == (mark_generated("# Result\n") if is_replaced else existing)
    assert "config.json" in hub.repositories["acme/support"]


@pytest.mark.parametrize("repository_exists", [False, True], ids=["new repository", "existing repository"])
def test_a_token_without_write_access_raises_invalid_spec(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch, repository_exists: bool
) -> None:
    if repository_exists:
        create_repository(TARGET)
    monkeypatch.setattr(huggingface, "HfApi", lambda: HfApi(endpoint=hub.address, token=READ_ONLY))

    with pytest.raises(InvalidSpec, match=r'pushToHub: the Hub rejected "acme/support" .*HF_TOKEN') as raised:
        create_repository(TARGET)

    assert READ_ONLY not in str(raised.value)


def test_a_hub_server_error_is_retryable(hub: FakeHub, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    create_repository(TARGET)
    hub.error_status = 501  # HTTP status code that the client does not retry

    with pytest.raises(HubUnavailable, match=r'publishing "acme/support" on the Hub failed: .*501'):
        upload(TARGET, tmp_path, title="default/first", files=("config.json",))


def test_an_unreachable_hub_is_retryable(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface, "HfApi", lambda: HfApi(endpoint="http://127.0.0.1:9", token=TOKEN))

    with pytest.raises(HubUnavailable, match=r"publishing .* failed"):
        create_repository(TARGET)
