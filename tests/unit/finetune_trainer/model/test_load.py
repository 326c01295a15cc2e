from pathlib import Path
from typing import Any

import pytest
import torch
from httpx2 import Request, Response
from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError
from peft import PeftModel
from transformers import AutoConfig, AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

from finetune_api.v1alpha1.lora import Lora
from finetune_api.v1alpha1.model_source import ModelSource
from finetune_trainer.errors import HubUnavailable, InvalidSpec, ModelError, ModelNotFound
from finetune_trainer.model import load
from finetune_trainer.model.load import describe_model
from finetune_trainer.model.lora import REFERENCE, TRAINED, add_adapters, choose_targets, keep_reference, shape_of
from finetune_trainer.model.merge import write_merged
from testing.models import tiny_text as tiny

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


@pytest.fixture(scope="module")
def adapter_folder(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One that was trained, as far as its numbers tell."""
    folder = tmp_path_factory.mktemp("adapter")
    model = add_adapters(base(model_folder), Lora(r=4, lora_alpha=8), seed=1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    model.save_pretrained(folder)  # type: ignore[operator]
    return folder


def base(folder: Path) -> torch.nn.Module:
    model: torch.nn.Module = AutoModelForCausalLM.from_pretrained(folder)
    return model


def logits(model: torch.nn.Module) -> torch.Tensor:
    found: torch.Tensor = model(input_ids=torch.arange(8)[None]).logits
    return found


def test_an_adapter_is_gone_on_from_with_its_own_shape_and_a_copy_that_stays(
    model_folder: Path, adapter_folder: Path
) -> None:
    model: Any = add_adapters(base(model_folder), Lora(adapter=str(adapter_folder)), seed=2)
    keep_reference(model, str(adapter_folder))

    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained
    assert all(f".{TRAINED}." in name for name in trained)
    assert model.peft_config[TRAINED].r == 4
    assert not torch.equal(logits(model), logits(base(model_folder)))
    before = logits(model)
    model.set_adapter(REFERENCE)
    assert torch.equal(logits(model), before)


@pytest.mark.parametrize("name", ["none", "empty"])
def test_an_adapter_that_is_not_there_is_named(model_folder: Path, tmp_path: Path, name: str) -> None:
    (tmp_path / "empty").mkdir()

    with pytest.raises(ModelNotFound, match=r"spec\.lora\.adapter: .* is no folder with an adapter_config\.json"):
        add_adapters(base(model_folder), Lora(adapter=str(tmp_path / name)), seed=2)


def test_an_adapter_of_another_model_is_refused(adapter_folder: Path) -> None:
    config = Qwen2Config(vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=1)

    with pytest.raises(ModelError, match="does not fit the model"):
        add_adapters(Qwen2ForCausalLM(config), Lora(adapter=str(adapter_folder)), seed=2)


@pytest.mark.parametrize("lora", [Lora(use_rslora=True), Lora(use_dora=True)], ids=["rsLoRA", "DoRA"])
def test_relatives_of_lora_begin_as_the_model_and_say_what_they_are(model_folder: Path, lora: Lora) -> None:
    model: Any = add_adapters(base(model_folder), lora, seed=2)

    config = model.peft_config[TRAINED]
    assert (config.use_rslora, config.use_dora) == (lora.use_rslora, lora.use_dora)
    assert torch.allclose(logits(model), logits(base(model_folder)), atol=1e-5)


def test_a_merged_model_needs_no_adapter(model_folder: Path, adapter_folder: Path, tmp_path: Path) -> None:
    adapted = PeftModel.from_pretrained(base(model_folder), adapter_folder)

    write_merged(describe_model(ModelSource(name=str(model_folder)), CPU), adapter_folder, tmp_path)

    assert torch.allclose(logits(base(tmp_path)), logits(adapted), atol=1e-5)
    assert (tmp_path / "tokenizer.json").is_file()


def test_the_shape_of_an_adapter_is_known_without_its_weights(adapter_folder: Path) -> None:
    shape = shape_of(Lora(adapter=str(adapter_folder), lora_dropout=0.1))

    assert (shape.r, shape.lora_alpha, shape.lora_dropout, shape.adapter) == (4, 8, 0.1, None)
    suffixes = {target.rpartition(".")[2] for target in shape.target_modules}
    assert suffixes == {"q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "gate_proj", "down_proj"}
