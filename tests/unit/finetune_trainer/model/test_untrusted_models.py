"""Tests that loading a model or a checkpoint runs no code of its files."""

import ast
import json
from pathlib import Path
from typing import Any

import pytest
import torch

import finetune_trainer
from finetune_api.v1alpha1.model_source import ModelSource
from finetune_trainer.errors import ModelError
from finetune_trainer.model.load import describe_model, load_weights
from testing.models import tiny_text


class Payload:
    """Object whose unpickling creates a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self.path,)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a model with pickled weights, which no safetensors file replaces."""
    tokenizer = tiny_text.build_tokenizer()
    tokenizer.save_pretrained(tmp_path / "model")
    model = tiny_text.build_model(len(tokenizer))
    model.config.save_pretrained(tmp_path / "model")
    torch.save(model.state_dict(), tmp_path / "model" / "pytorch_model.bin")
    return tmp_path / "model"


def load(folder: Path) -> torch.nn.Module:
    return load_weights(describe_model(ModelSource(name=str(folder)), torch.device("cpu")), torch.float32)


def test_pickled_weights_run_no_code(folder: Path, tmp_path: Path) -> None:
    assert load(folder).state_dict().keys(), "pickled weights can be loaded"
    marker = tmp_path / "marker"
    weights = {**torch.load(folder / "pytorch_model.bin", weights_only=True), "payload": Payload(marker)}
    torch.save(weights, folder / "pytorch_model.bin")

    with pytest.raises(ModelError, match=r"has pickled weights .*; convert them to safetensors"):
        load(folder)

    assert not marker.exists()
    torch.load(folder / "pytorch_model.bin", weights_only=False)
    assert marker.exists(), "the weights contain code"


def test_kernels_that_a_config_names_are_not_used(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    names = {"attn_implementation": "org/kernel", "experts_implementation": "org/kernel"}
    (folder / "config.json").write_text(json.dumps({**config, **names}))

    config = describe_model(ModelSource(name=str(folder)), torch.device("cpu")).config
    model: Any = load(folder)

    assert (config._attn_implementation, config._experts_implementation) == (None, None)
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize(
    ("name", "value"),
    [("num_hidden_layers", 10**9), ("num_layers", 0), ("num_attention_heads", 0), ("vocab_size", "many")],
)
@pytest.mark.parametrize("part", [None, "text_config"])
def test_senseless_sizes_of_a_model_are_refused_by_name(
    folder: Path, name: str, value: int | str, part: str | None
) -> None:
    config = json.loads((folder / "config.json").read_text())
    changed = {name: value} if part is None else {part: {name: value}}
    (folder / "config.json").write_text(json.dumps({**config, **changed}))

    with pytest.raises(ModelError, match=rf"config\.json: {name} is {value}, and must be from 1 to"):
        describe_model(ModelSource(name=str(folder)), torch.device("cpu"))


def test_code_in_the_folder_of_a_model_is_not_imported(folder: Path, tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    (folder / "custom.py").write_text(f"open({str(marker)!r}, 'w')\n")
    for name, classes in (
        ("config.json", {"AutoConfig": "custom.Config", "AutoModelForCausalLM": "custom.Model"}),
        ("tokenizer_config.json", {"AutoTokenizer": ["custom.Tokenizer", "custom.Tokenizer"]}),
    ):
        config = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps({**config, "auto_map": classes}))

    load(folder)

    assert not marker.exists()


def test_the_trainer_unpickles_only_weights() -> None:
    """Checkpoints are read from a claim that others may be able to write to."""
    trees = [ast.parse(path.read_text()) for path in Path(finetune_trainer.__file__).parent.rglob("*.py")]
    calls = [
        ast.unparse(node)
        for tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("torch.load", "pickle.load", "pickle.loads")
    ]

    assert len(calls) == 4
    own = "pickle.loads(pickle.dumps(error))"  # whether an error can be sent to another process
    assert [call for call in calls if call != own and not call.endswith("weights_only=True)")] == []
