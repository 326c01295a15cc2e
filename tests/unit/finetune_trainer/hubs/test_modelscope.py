"""The result on ModelScope: what is made, what is uploaded, and what is said where it cannot be."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from modelscope_hub import HubApi

from finetune_api.v1alpha1.output import PushToHub
from finetune_trainer.errors import HubUnavailable, InvalidSpec
from finetune_trainer.hubs import make_repository, modelscope, upload
from testing.fakes.modelscope import TOKEN, FakeModelScope, serve_modelscope

GUEST = "ms-may-read"
ACME = PushToHub(hub="modelscope", repo="acme/support")


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The client asks again and again, for a minute."""
    monkeypatch.setattr(time, "sleep", lambda _seconds: None)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeModelScope]:
    with serve_modelscope() as hub:
        monkeypatch.setattr(modelscope, "HubApi", lambda: HubApi(endpoint=hub.address, token=TOKEN))
        yield hub


@pytest.mark.parametrize(("private", "visibility"), [(True, 1), (False, 5)])
def test_a_repository_is_made_once_and_kept(hub: FakeModelScope, private: bool, visibility: int) -> None:
    make_repository(PushToHub(hub="modelscope", repo="acme/support", private=private))
    hub.repositories["acme/support"]["README.md"] = b"ours"

    make_repository(ACME)

    assert hub.repositories == {"acme/support": {"README.md": b"ours"}}
    assert [(made["Visibility"], made["License"]) for made in hub.made] == [(visibility, "Other")]


def test_the_whole_result_is_uploaded(hub: FakeModelScope, tmp_path: Path) -> None:
    files = {
        "adapter_model.safetensors": bytes(range(256)),
        "merged/config.json": b"{}",
        "README.md": b"---\nlibrary_name: peft\n---\n# Support\n",
    }
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    make_repository(ACME)

    address = upload(ACME, tmp_path, title="default/first")

    assert address == f"{hub.address}/models/acme/support"
    assert hub.repositories["acme/support"] == files
    assert hub.messages == ["Result of default/first (batch 1/1)"]  # as the client says it
    assert {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()} == set(files)


@pytest.mark.parametrize("exists", [False, True])
def test_a_token_that_may_not_write_is_the_users_to_change(
    hub: FakeModelScope, monkeypatch: pytest.MonkeyPatch, exists: bool
) -> None:
    if exists:
        make_repository(ACME)
    monkeypatch.setattr(modelscope, "HubApi", lambda: HubApi(endpoint=hub.address, token=GUEST))

    with pytest.raises(InvalidSpec, match=r'ModelScope refuses "acme/support" .*MODELSCOPE_API_TOKEN') as raised:
        make_repository(ACME)

    assert GUEST not in str(raised.value)


def test_a_hub_that_is_out_of_order_is_asked_again_later(hub: FakeModelScope, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    make_repository(ACME)
    hub.broken = 501  # which the client does not ask for again by itself

    with pytest.raises(HubUnavailable, match=r'ModelScope could not take "acme/support"'):
        upload(ACME, tmp_path, title="default/first")


def test_a_hub_that_is_not_there_is_asked_again_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modelscope, "HubApi", lambda: HubApi(endpoint="http://127.0.0.1:9", token=TOKEN))

    with pytest.raises(HubUnavailable, match="could not take"):
        make_repository(ACME)
