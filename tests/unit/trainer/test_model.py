from pathlib import Path

import pytest
import torch
from httpx2 import Request, Response
from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError
from transformers import AutoConfig

from finetune_api.v1alpha1 import Lora, ModelSource
from finetune_trainer.errors import HubUnavailable, InvalidSpec, ModelError, ModelNotFound
from finetune_trainer.model import load
from finetune_trainer.model.load import describe_model
from finetune_trainer.model.lora import add_adapters, choose_targets
from support import tiny

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tokenizer = tiny.build_tokenizer()
    tokenizer.save_pretrained(folder)
    tiny.build_model(len(tokenizer)).save_pretrained(folder)
    return folder


def test_a_model_is_known_before_its_weights_are_read(model_folder: Path) -> None:
    found = describe_model(ModelSource(name=str(model_folder)), CPU)

    assert found.dtype is torch.float32
    assert found.max_length == 512


@pytest.mark.parametrize(("name", "words"), [("none", "does not exist"), ("empty", "has no config.json")])
def test_a_path_without_a_model_is_named(tmp_path: Path, name: str, words: str) -> None:
    (tmp_path / "empty").mkdir()

    with pytest.raises(ModelNotFound) as raised:
        describe_model(ModelSource(name=str(tmp_path / name)), CPU)

    assert f'spec.model.name: "{tmp_path / name}" {words}' in str(raised.value)


def test_a_folder_with_an_unknown_architecture_cannot_be_trained(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "martian"}')

    with pytest.raises(ModelError, match="martian"):
        describe_model(ModelSource(name=str(tmp_path)), CPU)


ANSWER = Response(404, request=Request("GET", "https://hub.example/acme"))


@pytest.mark.parametrize(
    ("cause", "raised", "words"),
    [
        (RepositoryNotFoundError("404", response=ANSWER), ModelNotFound, "no path and no model on the Hub"),
        (GatedRepoError("403", response=ANSWER), ModelNotFound, "gated"),
        (ConnectionError("no route"), HubUnavailable, "acme/gone"),
    ],
    ids=["no such model", "gated", "no connection"],
)
def test_what_the_hub_answers_is_told_by_who_can_act(
    monkeypatch: pytest.MonkeyPatch, cause: Exception, raised: type[Exception], words: str
) -> None:
    def refuse(_name: str) -> None:
        raise OSError("acme/gone could not be had\nlong explanation") from cause

    monkeypatch.setattr(AutoConfig, "from_pretrained", refuse)

    with pytest.raises(raised, match=words):
        describe_model(ModelSource(name="acme/gone"), CPU)


def test_float16_on_cpu_is_refused_with_the_alternatives(model_folder: Path) -> None:
    with pytest.raises(InvalidSpec, match="needs a GPU; on CPU set float32 or bfloat16"):
        describe_model(ModelSource(name=str(model_folder), torch_dtype="float16"), CPU)


def test_bfloat16_that_a_gpu_only_emulates_is_refused(model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "has_native_bf16", lambda: False)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Tesla T4")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 5))

    with pytest.raises(InvalidSpec, match=r"Tesla T4 \(compute capability 7.5\) only emulates; set float16"):
        describe_model(ModelSource(name=str(model_folder), torch_dtype="bfloat16"), torch.device("cuda", 0))


def test_a_target_that_matches_nothing_lists_the_candidates() -> None:
    with pytest.raises(InvalidSpec) as raised:
        choose_targets(tiny.build_model(64), ("q_proj", "query"))

    assert "query matches no module" in str(raised.value)
    assert "down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj" in str(raised.value)


def test_all_linear_stands_alone() -> None:
    with pytest.raises(InvalidSpec, match="give it alone"):
        choose_targets(tiny.build_model(64), ("all-linear", "q_proj"))


def test_only_adapters_learn_and_the_seed_decides_how_they_begin() -> None:
    lora = Lora(r=4, target_modules=("q_proj",))
    first, second, other = (add_adapters(tiny.build_model(64), lora, seed=seed) for seed in (1, 1, 2))

    def trained(model: torch.nn.Module) -> dict[str, torch.Tensor]:
        return {name: each for name, each in model.named_parameters() if each.requires_grad}

    assert {name.split(".")[-3] for name in trained(first)} == {"lora_A", "lora_B"}
    assert all(torch.equal(one, trained(second)[name]) for name, one in trained(first).items())
    assert not all(torch.equal(one, trained(other)[name]) for name, one in trained(first).items())
