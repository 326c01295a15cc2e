"""Attention is chosen by measurement, from what is installed and computes the same."""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AttentionInterface, PretrainedConfig, Qwen2Config
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from finetune_api.v1alpha1.job import TrainerSpec
from finetune_trainer.errors import InvalidSpec
from finetune_trainer.model import attention_backend as attention
from finetune_trainer.model.attention_backend import (
    SDPA,
    Attention,
    Trial,
    choose_fastest,
    measure,
    settle_attention,
    trial_of,
)
from testing.builders import jobs as builders

CONFIG = Qwen2Config(
    hidden_size=32,
    num_attention_heads=4,
    num_key_value_heads=2,
    intermediate_size=64,
    num_hidden_layers=3,
    vocab_size=100,
)
CPU = torch.device("cpu")
TRIAL = Trial(CONFIG, torch.float32, CPU, rows=2, length=16, packed=True)
OWN = ALL_ATTENTION_FUNCTIONS[SDPA]
MASK = ALL_MASK_ATTENTION_FUNCTIONS[SDPA]


def taking(milliseconds: float, clock: list[float]) -> Callable[..., Any]:
    """Torch's own, by another clock."""

    def compute(*arguments: Any, **named: Any) -> Any:
        clock[0] += milliseconds / 1000
        return OWN(*arguments, **named)

    return compute


def one_that_fails(*_: Any, **__: Any) -> Any:
    raise RuntimeError("no kernel image is available\nfor this device")


def blind_to_packs(module: Any, query: Any, key: Any, value: Any, _mask: Any, **named: Any) -> Any:
    """Every row is one text to it, as to a kernel that does not know of positions."""
    return OWN(module, query, key, value, None, **{**named, "is_causal": True})


@pytest.fixture
def kinds(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Of attention, beside torch's own, which takes 2 ms."""
    clock = [0.0]
    monkeypatch.setattr(attention, "_now", lambda _device: clock[0])
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, SDPA, taking(2, clock))
    made = {
        "quick": taking(1, clock),
        "as_quick": taking(1.99, clock),
        "broken": one_that_fails,
        "blind": blind_to_packs,
    }
    for name, compute in made.items():
        AttentionInterface.register(name, compute)
        AttentionMaskInterface.register(name, MASK)
    yield
    for name in made:
        del ALL_ATTENTION_FUNCTIONS._global_mapping[name], ALL_MASK_ATTENTION_FUNCTIONS._global_mapping[name]


@pytest.mark.usefixtures("kinds")
def test_the_fastest_is_taken_and_all_are_told() -> None:
    found = measure(TRIAL, ("as_quick", "quick", "broken", "blind"))

    assert found.name == "quick"
    assert found.why == (
        "ms for a layer forward and backward, 2 x 16 tokens in packs: sdpa 2.00, as_quick 1.99, quick 1.00,"
        " broken fails: no kernel image is available, blind computes something else"
    )


@pytest.mark.usefixtures("kinds")
def test_what_is_hardly_faster_is_not_taken() -> None:
    assert measure(TRIAL, ("as_quick",)).name == SDPA


@pytest.mark.usefixtures("kinds")
def test_a_layer_that_cannot_be_tried_leaves_torchs_own() -> None:
    nameless = PretrainedConfig(num_hidden_layers=2, vocab_size=100)

    found = measure(replace(TRIAL, config=nameless), ("quick",))

    assert found.name == SDPA
    assert found.why.startswith("a layer alone cannot be tried: ")


@pytest.mark.usefixtures("kinds")
def test_a_measurement_draws_no_random_numbers() -> None:
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)

    measure(TRIAL, ("quick",))

    assert torch.rand(1) == expected


@pytest.mark.usefixtures("kinds")
def test_the_next_attempt_takes_the_same(tmp_path: Path) -> None:
    kept = tmp_path / "checkpoints" / "attention.json"
    first = choose_fastest(TRIAL, ("quick",), kept)

    assert choose_fastest(TRIAL, ("quick",), kept) == Attention("quick", "as in an attempt before")
    assert choose_fastest(TRIAL, ("quick", "broken"), kept).why != "as in an attempt before", "another image"
    assert json.loads(kept.read_text())["name"] == first.name == "quick"


def test_without_another_there_is_nothing_to_measure(tmp_path: Path) -> None:
    kept = tmp_path / "attention.json"

    assert choose_fastest(TRIAL, (), kept) == Attention(SDPA, "the only one here")
    assert not kept.exists()


def spec(**fields: Any) -> TrainerSpec:
    return TrainerSpec.model_validate({**builders.spec(), **fields})


def test_what_the_job_says_is_taken(tmp_path: Path) -> None:
    job = spec(model={"name": "m", "attnImplementation": "eager"})

    assert settle_attention(job, TRIAL, tmp_path, sees=True) == Attention("eager", "as the job says")


def test_what_is_not_installed_is_refused(tmp_path: Path) -> None:
    job = spec(model={"name": "m", "attnImplementation": "flash_attention_2"})

    with pytest.raises(InvalidSpec, match=r"flash_attention_2 is not installed .* sdpa, eager, or auto"):
        settle_attention(job, TRIAL, tmp_path, sees=False)


@pytest.mark.parametrize(("size", "rows"), [(1, 1), (4, 2), ("auto", 2)])
def test_several_packs_are_tried_where_a_micro_batch_has_several(size: int | str, rows: int) -> None:
    job = spec(
        dataset={"train": [{"name": "rows.jsonl"}], "packing": True, "maxLength": 64},
        training={"perDeviceTrainBatchSize": size, "globalBatchSize": 64},
    )

    assert trial_of(job, CONFIG, torch.float32, CPU, 64) == Trial(CONFIG, torch.float32, CPU, rows, 64, packed=True)
