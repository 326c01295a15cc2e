"""The result on the Hub: what is made, what is uploaded, and what is said where it cannot be."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import HfApi

from finetune_api.v1alpha1.output import PushToHub
from finetune_trainer.errors import HubUnavailable, InvalidSpec
from finetune_trainer.hubs import huggingface as trainers_hub
from finetune_trainer.hubs import make_repository, upload
from testing.fakes.hub import TOKEN, FakeHub, serve_hub

GUEST = "hf_may_read"
ACME = PushToHub(repo="acme/support")


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    with serve_hub() as hub:
        monkeypatch.setattr(trainers_hub, "HfApi", lambda: HfApi(endpoint=hub.address, token=TOKEN))
        yield hub


@pytest.mark.parametrize(("private", "visibility"), [(True, "private"), (False, "public")])
def test_a_repository_is_made_once_and_kept(hub: FakeHub, private: bool, visibility: str) -> None:
    make_repository(PushToHub(repo="acme/support", private=private))
    hub.repositories["acme/support"]["README.md"] = b"ours"

    make_repository(ACME)

    assert hub.repositories == {"acme/support": {"README.md": b"ours"}}
    assert hub.visibility == {"acme/support": visibility}


def test_the_whole_result_is_uploaded(hub: FakeHub, tmp_path: Path) -> None:
    (tmp_path / "merged").mkdir()
    (tmp_path / "adapter_model.safetensors").write_bytes(bytes(range(256)))
    (tmp_path / "merged/config.json").write_text("{}")
    (tmp_path / "README.md").write_text("---\nlibrary_name: peft\n---\n# Support\n")
    make_repository(ACME)

    address = upload(ACME, tmp_path, title="default/first")

    assert address == f"{hub.address}/acme/support/commit/1"
    assert hub.repositories["acme/support"] == {
        "adapter_model.safetensors": bytes(range(256)),
        "merged/config.json": b"{}",
        "README.md": b"---\nlibrary_name: peft\n---\n# Support\n",
    }
    assert hub.messages == ["Result of default/first"]


@pytest.mark.parametrize("exists", [False, True])
def test_a_token_that_may_not_write_is_the_users_to_change(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch, exists: bool
) -> None:
    if exists:
        make_repository(ACME)
    monkeypatch.setattr(trainers_hub, "HfApi", lambda: HfApi(endpoint=hub.address, token=GUEST))

    with pytest.raises(InvalidSpec, match=r'pushToHub: the Hub refuses "acme/support" .*HF_TOKEN') as raised:
        make_repository(ACME)

    assert GUEST not in str(raised.value)


def test_a_hub_that_is_out_of_order_is_asked_again_later(hub: FakeHub, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    make_repository(ACME)
    hub.broken = 501  # which the client does not ask for again by itself

    with pytest.raises(HubUnavailable, match=r'could not take "acme/support": .*501'):
        upload(ACME, tmp_path, title="default/first")


def test_a_hub_that_is_not_there_is_asked_again_later(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainers_hub, "HfApi", lambda: HfApi(endpoint="http://127.0.0.1:9", token=TOKEN))

    with pytest.raises(HubUnavailable, match="could not take"):
        make_repository(ACME)
