"""Tests loading a model and its tokenizer, and adding, continuing and merging adapters."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from httpx2 import Request, Response
from huggingface_hub.errors import (
    GatedRepoError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from peft import LoraConfig, LoraModel, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMultimodalLM, Qwen2Config, Qwen2ForCausalLM

from finetune_api.v1alpha1.lora import Lora
from finetune_api.v1alpha1.model_source import ModelSource
from finetune_trainer.errors import HubUnavailable, InvalidSpec, ModelError, ModelNotFound
from finetune_trainer.model import load
from finetune_trainer.model.load import describe_model, load_model, load_weights
from finetune_trainer.model.lora import (
    REFERENCE_ADAPTER,
    TRAINED_ADAPTER,
    add_adapters,
    add_reference_adapter,
    add_unloaded_adapters,
    choose_target_modules,
    find_routers,
)
from finetune_trainer.model.merge import write_merged_model
from finetune_trainer.model.weight_loading import WeightLoading
from testing.builders import jobs
from testing.models import attention_families, tiny_families, tiny_text, tiny_towers

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tokenizer = tiny_text.build_tokenizer()
    tokenizer.save_pretrained(folder)
    tiny_text.build_model(len(tokenizer)).save_pretrained(folder)
    return folder


def test_dtype_and_maximum_length_are_read_without_weights(model_folder: Path) -> None:
    model_description = describe_model(ModelSource(name=str(model_folder)), CPU)

    assert model_description.dtype is torch.float32
    assert model_description.max_length == 512


def test_weights_are_loaded_directly_to_the_device(model_folder: Path) -> None:
    """The meta device stands for a GPU, on which a copy in host memory would not be visible either."""
    model_description = describe_model(ModelSource(name=str(model_folder)), CPU)

    model = load_weights(model_description, torch.float32, WeightLoading(torch.device("meta")))

    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}


def test_a_damaged_file_raises_a_model_error(model_folder: Path, tmp_path: Path) -> None:
    shutil.copytree(model_folder, tmp_path, dirs_exist_ok=True)
    (tmp_path / "model.safetensors").write_bytes(b"{}")

    with pytest.raises(ModelError, match=r"cannot be loaded for text generation: .*deserializing header"):
        load_weights(describe_model(ModelSource(name=str(tmp_path)), CPU), torch.float32)


@pytest.mark.parametrize(("name", "problem"), [("none", "does not exist"), ("empty", "has no config.json")])
def test_the_error_for_a_path_without_a_model_contains_the_path(tmp_path: Path, name: str, problem: str) -> None:
    (tmp_path / "empty").mkdir()

    with pytest.raises(ModelNotFound) as raised:
        describe_model(ModelSource(name=str(tmp_path / name)), CPU)

    assert f'spec.model.name: "{tmp_path / name}" {problem}' in str(raised.value)


def test_an_unknown_architecture_raises_a_model_error(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "martian"}')

    with pytest.raises(ModelError, match="martian"):
        describe_model(ModelSource(name=str(tmp_path)), CPU)


def test_the_error_for_an_unreadable_model_file_contains_name_and_mode(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test replaces os.access, because root can read every file."""
    weights = model_folder / "model.safetensors"
    weights.chmod(0o600)
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != weights)

    def open_weights() -> None:
        raise FileNotFoundError(f"No such file or directory: {weights}")

    with pytest.raises(ModelError, match=r"may not read model.safetensors \(mode 0600\); run chmod -R a\+rX"):
        load.load_or_raise(ModelSource(name=str(model_folder)), open_weights)


RESPONSE = Response(404, request=Request("GET", "https://hub.example/acme"))


@pytest.mark.parametrize(
    ("cause", "error_type", "message"),
    [
        (RepositoryNotFoundError("404", response=RESPONSE), ModelNotFound, "neither a path nor a model on the Hub"),
        (GatedRepoError("403", response=RESPONSE), ModelNotFound, "gated"),
        (HFValidationError("too many slashes"), ModelNotFound, "neither a path nor a model on the Hub"),
        (RevisionNotFoundError("404", response=RESPONSE), ModelNotFound, 'spec.model.revision: "v2" is no branch'),
        (ConnectionError("no route"), HubUnavailable, "acme/gone"),
        (LocalEntryNotFoundError("not in the cache"), HubUnavailable, "acme/gone"),
    ],
    ids=["missing model", "gated model", "invalid name", "missing revision", "no connection", "not in the cache"],
)
def test_hub_errors_are_classified_by_cause(
    monkeypatch: pytest.MonkeyPatch, cause: Exception, error_type: type[Exception], message: str
) -> None:
    def raise_os_error(_name: str, **_: object) -> None:
        raise OSError("acme/gone could not be loaded\nlong explanation") from cause

    monkeypatch.setattr(AutoConfig, "from_pretrained", raise_os_error)

    with pytest.raises(error_type, match=message):
        describe_model(ModelSource(name="acme/gone", revision="v2"), CPU)


def test_a_revision_of_a_relative_path_is_rejected(model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(model_folder.parent)

    with pytest.raises(InvalidSpec, match=r'spec\.model\.revision: "v1" is set, but model ".*" is a path'):
        describe_model(ModelSource(name=model_folder.name, revision="v1"), CPU)


def test_float16_on_cpu_is_rejected_with_alternatives(model_folder: Path) -> None:
    with pytest.raises(InvalidSpec, match="needs a GPU; on CPU set float32 or bfloat16"):
        describe_model(ModelSource(name=str(model_folder), torch_dtype="float16"), CPU)


def test_bfloat16_is_rejected_on_a_gpu_without_native_support(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load, "has_native_bf16", lambda: False)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Tesla T4")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 5))

    with pytest.raises(InvalidSpec, match=r"Tesla T4 \(compute capability 7.5\) only emulates; set float16"):
        describe_model(ModelSource(name=str(model_folder), torch_dtype="bfloat16"), torch.device("cuda", 0))


def test_the_error_for_an_unknown_target_module_lists_the_candidates() -> None:
    with pytest.raises(InvalidSpec) as raised:
        choose_target_modules(tiny_text.build_model(64), ("q_proj", "query"))

    assert "query matches no module" in str(raised.value)
    assert "down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj" in str(raised.value)


def test_all_linear_in_combination_with_other_targets_is_rejected() -> None:
    with pytest.raises(InvalidSpec, match="set it alone"):
        choose_target_modules(tiny_text.build_model(64), ("all-linear", "q_proj"))


def find_adapted_modules(model: torch.nn.Module) -> set[str]:
    """Return the last two name components of the adapted modules in the first layer."""
    names = [name for name, weight in model.named_parameters() if weight.requires_grad and ".layers.0." in name]
    return {".".join(name.partition(".lora_")[0].split(".")[-2:]) for name in names}


ATTENTION = {"self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"}
FUSED_EXPERTS = {"mlp.experts", "experts.base_layer"}  # the parameters gate_up_proj and down_proj


@pytest.mark.parametrize(
    ("model_type", "adapted"),
    [("qwen3_moe", ATTENTION | FUSED_EXPERTS), ("mixtral", ATTENTION | FUSED_EXPERTS), ("gpt_oss", ATTENTION)],
)
def test_all_linear_excludes_the_router(model_type: str, adapted: set[str]) -> None:
    model = add_adapters(tiny_families.build_model(model_type), Lora(r=2), seed=1)

    assert find_adapted_modules(model) == adapted


def test_the_router_is_adapted_if_it_is_named() -> None:
    lora = Lora(r=2, target_modules=("q_proj", "gate"))

    model = add_adapters(tiny_families.build_model("qwen3_moe"), lora, seed=1)

    assert find_adapted_modules(model) == {"self_attn.q_proj", "mlp.gate"}


def test_a_router_that_is_a_linear_layer_is_excluded() -> None:
    """The router of Llama 4 returns a tuple, which an adapter cannot process."""
    model: Any = AutoModelForMultimodalLM.from_config(tiny_towers.build_config("llama4"))

    adapted = add_adapters(model, Lora(r=2), seed=1, exclude_modules=r"vision_model.*|multi_modal_projector.*")

    assert set(find_routers(model)) == {f"language_model.model.layers.{layer}.feed_forward.router" for layer in (0, 1)}
    assert not any("router" in name for name in find_adapted_modules(adapted))


def test_experts_in_excluded_modules_get_no_adapters() -> None:
    model = add_adapters(tiny_families.build_model("qwen3_moe"), Lora(r=2), seed=1, exclude_modules=r".*\.mlp\..*")

    assert find_adapted_modules(model) == ATTENTION


def test_only_adapters_are_trainable_and_their_initial_values_depend_on_the_seed() -> None:
    def draw_trained_weights(seed: int) -> dict[str, torch.Tensor]:
        model = add_adapters(tiny_text.build_model(64), Lora(r=4, target_modules=("q_proj",)), seed=seed)
        return {name: weight for name, weight in model.named_parameters() if weight.requires_grad}

    first, second, other = (draw_trained_weights(seed) for seed in (1, 1, 2))

    assert {name.split(".")[-3] for name in first} == {"lora_A", "lora_B"}
    assert all(torch.equal(weight, second[name]) for name, weight in first.items())
    assert not all(torch.equal(weight, other[name]) for name, weight in first.items())


@pytest.fixture(scope="module")
def adapter_folder(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with an adapter whose lora_B weights are nonzero, as after training."""
    folder = tmp_path_factory.mktemp("adapter")
    model = add_adapters(load_base_model(model_folder), Lora(r=4, lora_alpha=8), seed=1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    model.save_pretrained(folder)  # type: ignore[operator]
    return folder


def load_base_model(folder: Path) -> torch.nn.Module:
    model: torch.nn.Module = AutoModelForCausalLM.from_pretrained(folder)
    return model


def compute_logits(model: torch.nn.Module) -> torch.Tensor:
    output: torch.Tensor = model(input_ids=torch.arange(8)[None]).logits
    return output


def test_a_continued_adapter_keeps_its_rank_and_has_a_frozen_reference_copy(
    model_folder: Path, adapter_folder: Path
) -> None:
    model: Any = add_adapters(load_base_model(model_folder), Lora(adapter=str(adapter_folder)), seed=2)
    add_reference_adapter(model, str(adapter_folder))

    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained
    assert all(f".{TRAINED_ADAPTER}." in name for name in trained)
    assert model.peft_config[TRAINED_ADAPTER].r == 4
    assert not torch.equal(compute_logits(model), compute_logits(load_base_model(model_folder)))
    continued_logits = compute_logits(model)
    model.set_adapter(REFERENCE_ADAPTER)
    assert torch.equal(compute_logits(model), continued_logits)


@pytest.mark.parametrize("name", ["none", "empty"])
def test_a_path_without_an_adapter_is_rejected(model_folder: Path, tmp_path: Path, name: str) -> None:
    (tmp_path / "empty").mkdir()

    with pytest.raises(ModelNotFound, match=r"spec\.lora\.adapter: .* neither a folder with an adapter_config\.json"):
        add_adapters(load_base_model(model_folder), Lora(adapter=str(tmp_path / name)), seed=2)


def test_an_adapter_for_another_model_is_rejected(adapter_folder: Path) -> None:
    config = Qwen2Config(vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=1)

    with pytest.raises(ModelError, match="does not fit the model"):
        add_adapters(Qwen2ForCausalLM(config), Lora(adapter=str(adapter_folder)), seed=2)


@pytest.mark.parametrize("lora", [Lora(use_rslora=True), Lora(use_dora=True)], ids=["rsLoRA", "DoRA"])
def test_the_initial_output_of_lora_variants_equals_the_output_of_the_base_model(
    model_folder: Path, lora: Lora
) -> None:
    model: Any = add_adapters(load_base_model(model_folder), lora, seed=2)

    config = model.peft_config[TRAINED_ADAPTER]
    assert (config.use_rslora, config.use_dora) == (lora.use_rslora, lora.use_dora)
    assert torch.allclose(compute_logits(model), compute_logits(load_base_model(model_folder)), atol=1e-5)


def test_a_merged_model_has_the_same_logits_as_the_model_with_adapters(
    model_folder: Path, adapter_folder: Path, tmp_path: Path
) -> None:
    adapted = PeftModel.from_pretrained(load_base_model(model_folder), adapter_folder)

    description = describe_model(ModelSource(name=str(model_folder)), CPU)
    write_merged_model(description, adapter_folder, tmp_path, report_progress=lambda: None)

    assert torch.allclose(compute_logits(load_base_model(tmp_path)), compute_logits(adapted), atol=1e-5)
    assert (tmp_path / "tokenizer.json").is_file()


@pytest.mark.parametrize("fields", [{"bias": "all"}, {"bias": "lora_only"}, {"lora_bias": True}], ids=str)
def test_an_adapter_that_contains_biases_is_merged(model_folder: Path, tmp_path: Path, fields: dict[str, Any]) -> None:
    config = LoraConfig(target_modules=["q_proj", "v_proj"], **fields)
    adapted = get_peft_model(load_base_model(model_folder), config)
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter += 0.1
    adapted.save_pretrained(tmp_path / "adapter")

    description = describe_model(ModelSource(name=str(model_folder)), CPU)
    write_merged_model(description, tmp_path / "adapter", tmp_path / "merged", report_progress=lambda: None)

    assert torch.allclose(compute_logits(load_base_model(tmp_path / "merged")), compute_logits(adapted), atol=1e-5)


@pytest.mark.parametrize(
    ("name", "reported"), [("embed_tokens", "lm_head"), ("layers.0.self_attn.q_proj", "self_attn.q_proj")]
)
def test_a_merged_model_with_a_wrong_tensor_is_an_error(
    model_folder: Path, adapter_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, reported: str
) -> None:
    """Merging must change no other tensor than the targets, and those by the update of the adapter.

    The output layer has the weight of the embeddings.
    """
    merge_and_unload = LoraModel.merge_and_unload

    def merge_wrongly(model: LoraModel) -> Any:
        merged = merge_and_unload(model)
        with torch.no_grad():
            merged.get_submodule(f"model.{name}").weight[0, 0] += 1
        return merged

    monkeypatch.setattr(LoraModel, "merge_and_unload", merge_wrongly)
    description = describe_model(ModelSource(name=str(model_folder)), CPU)

    with pytest.raises(ModelError, match=rf"tensors of the merged model are wrong, such as .*{reported}"):
        write_merged_model(description, adapter_folder, tmp_path, report_progress=lambda: None)


@pytest.mark.parametrize("target", ["lm_head", "embed_tokens"])
def test_an_adapter_of_a_shared_weight_is_not_merged(model_folder: Path, target: str) -> None:
    """Both layers have the weight of the merged one in a model that shares it."""
    with pytest.raises(InvalidSpec, match=r"spec\.lora\.merge: the adapter changes the output layer or the embeddings"):
        add_adapters(load_base_model(model_folder), Lora(target_modules=(target,), merge=True), seed=2)

    add_adapters(load_base_model(model_folder), Lora(target_modules=(target,)), seed=2)
    untied = attention_families.build_model(attention_families.CONFIGS["llama"]())
    add_adapters(untied, Lora(target_modules=(target,), merge=True), seed=2)


def change_tensors(source: Path, folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """Copy a folder, and change the tensors of its file."""
    shutil.copytree(source, folder)
    (file,) = folder.glob("*.safetensors")
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


def test_missing_and_unexpected_tensors_of_an_adapter_are_errors(
    model_folder: Path, adapter_folder: Path, tmp_path: Path
) -> None:
    def add_other(tensors: dict[str, torch.Tensor]) -> None:
        tensors["base_model.model.other.lora_A.weight"] = torch.ones(1)

    change_tensors(adapter_folder, tmp_path / "missing", lambda tensors: tensors.pop(min(tensors)))
    change_tensors(adapter_folder, tmp_path / "unexpected", add_other)

    for name, problem in (("missing", "has no tensor"), ("unexpected", "has an unexpected tensor")):
        with pytest.raises(ModelError, match=f"does not fit the model .*it {problem} "):
            add_adapters(load_base_model(model_folder), Lora(adapter=str(tmp_path / name)), seed=2)


def test_missing_tensors_of_a_model_are_an_error_and_unexpected_ones_are_logged(
    model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    change_tensors(model_folder, tmp_path / "missing", lambda tensors: tensors.pop(max(tensors)))
    change_tensors(model_folder, tmp_path / "other", lambda tensors: tensors.update(other=torch.ones(1)))

    with pytest.raises(ModelError, match="lacks 1 tensors of its architecture, such as model"):
        load_weights(describe_model(ModelSource(name=str(tmp_path / "missing")), CPU), torch.float32)
    load_weights(describe_model(ModelSource(name=str(tmp_path / "other")), CPU), torch.float32)
    assert "model: 1 tensors of the files are not used: other" in capsys.readouterr().out


@pytest.mark.parametrize("model_type", ["qwen3_moe", "gemma2"])
def test_unloaded_adapters_have_the_shapes_of_the_continued_ones(tmp_path: Path, model_type: str) -> None:
    """peft stores the fused experts of a mixture separately from the names of the adapted layers."""
    first = add_adapters(tiny_families.build_model(model_type), Lora(r=3), seed=1)
    first.save_pretrained(tmp_path)  # type: ignore[operator]
    lora = Lora(adapter=str(tmp_path))
    continued = add_adapters(tiny_families.build_model(model_type), lora, seed=1)

    (tmp_path / "adapter_model.safetensors").unlink()
    unloaded = add_unloaded_adapters(tiny_families.build_model(model_type), lora)

    def list_trained_shapes(model: torch.nn.Module) -> dict[str, torch.Size]:
        return {name: weight.shape for name, weight in model.named_parameters() if weight.requires_grad}

    assert list_trained_shapes(unloaded) == list_trained_shapes(continued) == list_trained_shapes(first)
    assert any(".experts." in name for name in list_trained_shapes(unloaded)) == (model_type == "qwen3_moe")


def write_adapter_config(source: Path, folder: Path, **fields: Any) -> Lora:
    """Copy an adapter with changed fields of its config."""
    shutil.copytree(source, folder)
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps({**config, **fields}))
    return Lora(adapter=str(folder))


def test_patterns_of_an_adapter_are_replaced_by_the_names_that_they_match(
    model_folder: Path, adapter_folder: Path, tmp_path: Path
) -> None:
    pattern = r"^(?!.*lm_head).*\.(q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj)"
    ranks = {r".*\.self_attn\.q_proj": 4}  # as peft writes it
    lora = write_adapter_config(adapter_folder, tmp_path / "a", target_modules=pattern, rank_pattern=ranks)

    model: Any = add_adapters(load_base_model(model_folder), lora, seed=2)

    config = model.peft_config[TRAINED_ADAPTER]
    names = {name for name, _ in load_base_model(model_folder).named_modules() if name.endswith("_proj")}
    assert set(config.target_modules) == names
    continued: Any = add_adapters(load_base_model(model_folder), Lora(adapter=str(adapter_folder)), seed=2)
    assert torch.equal(compute_logits(model), compute_logits(continued))


@pytest.mark.parametrize("field", ["target_modules", "exclude_modules"])
@pytest.mark.parametrize(
    ("pattern", "message"), [("(.*.*.*.*.*.*.*.*.*.*)*x", "within 1 s"), ("(", "unterminated subpattern")]
)
def test_a_pattern_of_an_adapter_that_does_not_end_is_refused(
    model_folder: Path,
    adapter_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    field: str,
    pattern: str,
    message: str,
) -> None:
    monkeypatch.setattr("finetune_trainer.model.lora._MATCH_SECONDS", 1)
    lora = write_adapter_config(adapter_folder, tmp_path / "a", **{field: pattern})

    with pytest.raises(ModelError, match=rf"spec\.lora\.adapter: .*{field}: .*{message}.*; replace it by a list"):
        add_adapters(load_base_model(model_folder), lora, seed=2)


@pytest.mark.parametrize(
    ("field", "value"),
    [("modules_to_save", ["(.*.*.*.*.*.*)*x"]), ("rank_pattern", {"q_.*": 4}), ("alpha_pattern", {"q_.*": 4})],
)
def test_patterns_in_fields_with_names_of_modules_are_refused(
    model_folder: Path, adapter_folder: Path, tmp_path: Path, field: str, value: object
) -> None:
    lora = write_adapter_config(adapter_folder, tmp_path / "a", **{field: value})

    with pytest.raises(ModelError, match=rf"{field}: .* cannot be used .*; replace it by a list of names"):
        add_adapters(load_base_model(model_folder), lora, seed=2)


def test_a_continued_adapter_names_the_model_on_which_it_was_trained(
    model_folder: Path, adapter_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lora = write_adapter_config(adapter_folder, tmp_path / "a", base_model_name_or_path="other-org/another-model")
    spec = jobs.parse_spec(model={"name": str(model_folder)}, lora={"adapter": lora.adapter})

    model: Any = load_model(spec, describe_model(spec.model, CPU))

    assert model.peft_config[TRAINED_ADAPTER].base_model_name_or_path == str(model_folder)
    assert f'trained on "other-org/another-model"; it is continued on "{model_folder}"' in capsys.readouterr().out


def test_a_link_in_an_adapter_is_refused(model_folder: Path, adapter_folder: Path, tmp_path: Path) -> None:
    lora = write_adapter_config(adapter_folder, tmp_path / "a")
    (tmp_path / "a" / "adapter_config.json").unlink()
    (tmp_path / "a" / "adapter_config.json").symlink_to(adapter_folder / "adapter_config.json")

    with pytest.raises(ModelError, match=r"adapter_config\.json leads to"):
        add_adapters(load_base_model(model_folder), lora, seed=2)


def test_pickled_weights_of_an_adapter_are_named(model_folder: Path, adapter_folder: Path, tmp_path: Path) -> None:
    lora = write_adapter_config(adapter_folder, tmp_path / "a")
    (tmp_path / "a" / "adapter_model.safetensors").unlink()
    torch.save({"weight": Path("x")}, tmp_path / "a" / "adapter_model.bin")

    with pytest.raises(ModelError, match=r"has pickled weights .*; convert them to safetensors"):
        add_adapters(load_base_model(model_folder), lora, seed=2)
