"""Tests benchmarking and choosing the attention implementation, with a fake clock."""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AttentionInterface, Gemma4AudioConfig, Gemma4Config, PretrainedConfig, Qwen2Config
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from finetune_api.v1alpha1.job import TrainerSpec
from finetune_trainer.errors import InvalidSpec
from finetune_trainer.model import attention_backend, varlen_attention
from finetune_trainer.model.attention_backend import (
    EAGER,
    SDPA,
    AttentionChoice,
    AttentionTrial,
    benchmark_backends,
    build_attention_trial,
    choose_fastest_backend,
    choose_simulated_attention,
    describe_linear_attention,
    describe_slow_linear_attention,
    disable_cudnn_attention,
    select_attention,
    supports_sdpa,
)
from finetune_trainer.model.varlen_attention import VARLEN
from testing.builders.jobs import parse_spec
from testing.models import attention_families, tiny_families, tiny_vision

CONFIG = Qwen2Config(
    hidden_size=32,
    num_attention_heads=4,
    num_key_value_heads=2,
    intermediate_size=64,
    num_hidden_layers=3,
    vocab_size=100,
)
CPU = torch.device("cpu")
TRIAL = AttentionTrial(CONFIG, torch.float32, CPU, row_count=2, tokens_per_row=16, is_packed=True)
SDPA_FORWARD = ALL_ATTENTION_FUNCTIONS[SDPA]
SDPA_MASK = ALL_MASK_ATTENTION_FUNCTIONS[SDPA]


def request(implementation: str) -> TrainerSpec:
    """Return the spec of a job that sets the attention implementation."""
    return parse_spec(model={"name": "m", "attnImplementation": implementation})


def build_slow_attention(milliseconds: float, clock: list[float]) -> Callable[..., Any]:
    """Return an SDPA function that advances the fake clock by `milliseconds`."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        clock[0] += milliseconds / 1000
        return SDPA_FORWARD(*args, **kwargs)

    return forward


def raise_kernel_error(*_: Any, **__: Any) -> Any:
    raise RuntimeError("no kernel image is available\nfor this device")


def ignore_packing(module: Any, query: Any, key: Any, value: Any, _mask: Any, **kwargs: Any) -> Any:
    """Attend to all previous rows of a pack, like a kernel that ignores position ids."""
    return SDPA_FORWARD(module, query, key, value, None, **{**kwargs, "is_causal": True})


@pytest.fixture
def fake_backends(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Register four fake implementations and a fake SDPA that takes 2 ms."""
    clock = [0.0]
    monkeypatch.setattr(attention_backend, "_read_clock", lambda _device: clock[0])
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, SDPA, build_slow_attention(2, clock))
    implementations = {
        "fast": build_slow_attention(1, clock),
        "barely_faster": build_slow_attention(1.99, clock),
        "failing": raise_kernel_error,
        "ignores_packing": ignore_packing,
    }
    for name, forward in implementations.items():
        AttentionInterface.register(name, forward)
        AttentionMaskInterface.register(name, SDPA_MASK)
    yield
    for name in implementations:
        del ALL_ATTENTION_FUNCTIONS._global_mapping[name], ALL_MASK_ATTENTION_FUNCTIONS._global_mapping[name]


@pytest.mark.usefixtures("fake_backends")
def test_the_fastest_correct_backend_is_chosen_and_the_reason_lists_all_results() -> None:
    choice = benchmark_backends(TRIAL, ("barely_faster", "fast", "failing", "ignores_packing"))

    assert choice.name == "fast"
    assert choice.reason == (
        "ms per layer, forward and backward, 2 x 16 tokens, packed: sdpa 2.00, barely_faster 1.99, fast 1.00,"
        " failing fails: no kernel image is available, ignores_packing wrong output"
    )


@pytest.mark.usefixtures("fake_backends")
def test_a_backend_that_is_barely_faster_than_sdpa_is_not_chosen() -> None:
    assert benchmark_backends(TRIAL, ("barely_faster",)).name == SDPA


@pytest.mark.usefixtures("fake_backends")
def test_sdpa_is_chosen_if_the_layer_cannot_be_built() -> None:
    without_architecture = PretrainedConfig(num_hidden_layers=2, vocab_size=100)

    choice = benchmark_backends(replace(TRIAL, config=without_architecture), ("fast",))

    assert choice.name == SDPA
    assert choice.reason.startswith("a single layer cannot be benchmarked: ")


@pytest.mark.usefixtures("fake_backends")
def test_a_benchmark_does_not_change_the_random_state() -> None:
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)

    benchmark_backends(TRIAL, ("fast",))

    assert torch.rand(1) == expected


@pytest.mark.usefixtures("fake_backends")
def test_the_next_attempt_with_the_same_candidates_reuses_the_choice(tmp_path: Path) -> None:
    cache_file = tmp_path / "checkpoints" / "attention.json"
    reused = AttentionChoice("fast", "chosen by an earlier attempt")
    first = choose_fastest_backend(TRIAL, ("fast",), cache_file)

    assert choose_fastest_backend(TRIAL, ("fast",), cache_file) == reused
    assert choose_fastest_backend(TRIAL, ("fast", "failing"), cache_file).reason != reused.reason, "candidates differ"
    assert json.loads(cache_file.read_text())["name"] == first.name == "fast"


@pytest.mark.usefixtures("fake_backends")
@pytest.mark.parametrize("is_damaged", [True, False], ids=["damaged", "a name that is no candidate"])
def test_a_stored_choice_that_is_no_candidate_is_not_used(tmp_path: Path, is_damaged: bool) -> None:
    cache_file = tmp_path / "attention.json"
    choose_fastest_backend(TRIAL, ("fast",), cache_file)
    other_choice = cache_file.read_text().replace('"name": "fast"', '"name": "org/kernel"')
    cache_file.write_text("[" * 10_000 if is_damaged else other_choice)

    assert choose_fastest_backend(TRIAL, ("fast",), cache_file).name == "fast"


def test_sdpa_is_chosen_without_a_benchmark_if_there_are_no_candidates(tmp_path: Path) -> None:
    cache_file = tmp_path / "attention.json"

    assert choose_fastest_backend(TRIAL, (), cache_file) == AttentionChoice(SDPA, "no other is installed")
    assert not cache_file.exists()


@pytest.mark.parametrize("config", [CONFIG, tiny_families.build_config("gemma2")], ids=["with SDPA", "without SDPA"])
def test_the_implementation_set_in_the_spec_is_chosen(tmp_path: Path, config: PretrainedConfig) -> None:
    choice = select_attention(request(EAGER), replace(TRIAL, config=config), tmp_path, is_multimodal=config is CONFIG)

    assert choice == AttentionChoice(EAGER, "set in spec.model.attnImplementation")


@pytest.mark.parametrize("requested", ["auto", VARLEN])
def test_attention_without_padding_is_chosen_if_the_model_supports_it(tmp_path: Path, requested: str) -> None:
    job = request(requested)

    for is_multimodal in (False, True):
        assert select_attention(job, TRIAL, tmp_path, is_multimodal=is_multimodal).name == VARLEN
    assert choose_simulated_attention(job, CONFIG) == VARLEN


def test_the_reason_names_the_obstacle_to_attention_without_padding(tmp_path: Path) -> None:
    config = attention_families.build_linear_attention_config()

    choice = select_attention(parse_spec(), replace(TRIAL, config=config), tmp_path, is_multimodal=False)

    assert choice.name == SDPA
    assert choice.reason == ("no other is installed; varlen is not supported: the model has layers of linear attention")


@pytest.mark.parametrize(
    ("is_packed", "tokens_per_row"), [(False, 16), (True, 16), (True, 3)], ids=["rows", "packs", "short packs"]
)
def test_one_layer_has_the_same_output_with_and_without_padding(is_packed: bool, tokens_per_row: int) -> None:
    trial = replace(TRIAL, is_packed=is_packed, tokens_per_row=tokens_per_row)
    layer = attention_backend._build_layer(trial)

    expected, _ = attention_backend._time_layer(layer, SDPA, trial)
    actual, _ = attention_backend._time_layer(layer, VARLEN, trial)

    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize(
    ("forward", "obstacle"),
    [
        (varlen_attention.compute_varlen_attention, None),
        (raise_kernel_error, "fails: no kernel image is available"),
        (lambda _module, query, *_, **__: (torch.zeros_like(query.transpose(1, 2)), None), "wrong output"),
    ],
    ids=["correct", "failing", "wrong"],
)
def test_the_kernel_is_tried_on_a_gpu(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, forward: Callable[..., Any], obstacle: str | None
) -> None:
    monkeypatch.setattr(attention_backend, "_runs_kernel", lambda _: True)
    monkeypatch.setattr(attention_backend, "find_varlen_obstacle", lambda *_, **__: None)
    original = ALL_ATTENTION_FUNCTIONS[VARLEN]
    AttentionInterface.register(VARLEN, forward)
    try:
        choice = select_attention(parse_spec(), TRIAL, tmp_path, is_multimodal=False)
    finally:
        AttentionInterface.register(VARLEN, original)

    assert choice.name == (VARLEN if obstacle is None else SDPA)
    assert obstacle is None or obstacle in choice.reason


def test_sdpa_does_not_choose_cudnn() -> None:
    before = torch.backends.cuda.cudnn_sdp_enabled()  # type: ignore[no-untyped-call]
    try:
        torch.backends.cuda.enable_cudnn_sdp(True)
        disable_cudnn_attention()
        assert not torch.backends.cuda.cudnn_sdp_enabled()  # type: ignore[no-untyped-call]
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


def test_an_implementation_that_is_not_installed_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(InvalidSpec, match=r"flash_attention_2 is not installed .* sdpa, eager, or auto"):
        select_attention(request("flash_attention_2"), TRIAL, tmp_path, is_multimodal=False)


@pytest.mark.parametrize(("micro_batch_size", "row_count"), [(1, 1), (4, 2), ("auto", 2)])
def test_the_benchmark_uses_at_most_two_rows(micro_batch_size: int | str, row_count: int) -> None:
    job = parse_spec(
        dataset={"train": [{"name": "rows.jsonl"}], "packing": True, "maxLength": 64},
        training={"perDeviceTrainBatchSize": micro_batch_size, "globalBatchSize": 64},
    )

    trial = build_attention_trial(job, CONFIG, torch.float32, CPU, 64)

    assert trial == AttentionTrial(CONFIG, torch.float32, CPU, row_count, 64, is_packed=True)


def build_config_without_sdpa(model_type: str) -> PretrainedConfig:
    """Return a config of a model whose language model or, for Gemma 4, audio tower has no SDPA."""
    if model_type == "gemma4":
        return Gemma4Config(audio_config=Gemma4AudioConfig())
    return tiny_families.build_config(model_type)


WITHOUT_SDPA = (*tiny_families.WITHOUT_SDPA, "gemma4")


@pytest.mark.parametrize("is_multimodal", [False, True], ids=["text", "multimodal"])
@pytest.mark.parametrize("model_type", tiny_families.WITHOUT_SDPA)
def test_auto_falls_back_to_eager_for_a_model_without_sdpa(
    tmp_path: Path, model_type: str, is_multimodal: bool
) -> None:
    trial = replace(TRIAL, config=build_config_without_sdpa(model_type))

    choice = select_attention(parse_spec(), trial, tmp_path, is_multimodal=is_multimodal)

    assert choice.name == EAGER
    assert choice.reason.startswith(f"models of type {model_type} have no sdpa; ")


@pytest.mark.parametrize(
    ("implementation", "model_type", "problem"),
    [
        (VARLEN, "gemma2", 'varlen does not work with model "m": .* support softcap; set auto'),
        *((SDPA, name, f'model "m" of type {name} has no sdpa; set eager, or auto') for name in WITHOUT_SDPA),
    ],
)
def test_an_implementation_that_the_model_does_not_support_is_rejected(
    tmp_path: Path, implementation: str, model_type: str, problem: str
) -> None:
    job, config = request(implementation), build_config_without_sdpa(model_type)
    message = rf"spec\.model\.attnImplementation: {problem}"

    with pytest.raises(InvalidSpec, match=message):
        select_attention(job, replace(TRIAL, config=config), tmp_path, is_multimodal=False)
    with pytest.raises(InvalidSpec, match=message):
        choose_simulated_attention(job, config)


def test_the_text_part_needs_no_padding_although_the_audio_tower_has_no_sdpa(tmp_path: Path) -> None:
    trial = replace(TRIAL, config=build_config_without_sdpa("gemma4"))

    assert select_attention(parse_spec(), trial, tmp_path, is_multimodal=False).name == VARLEN


@pytest.mark.parametrize("model_type", tiny_vision.RECIPES)
def test_the_supported_vision_language_families_have_sdpa(model_type: str) -> None:
    tokenizer = tiny_vision.build_tokenizer(model_type)

    assert supports_sdpa(tiny_vision.RECIPES[model_type].build_config(len(tokenizer), tokenizer))


@pytest.mark.parametrize(("is_installed", "name"), [(False, "torch"), (True, "fla")])
def test_the_log_reports_the_implementation_of_linear_attention(
    monkeypatch: pytest.MonkeyPatch, is_installed: bool, name: str
) -> None:
    monkeypatch.setattr(attention_backend, "has_linear_attention_kernels", lambda: is_installed)
    tokenizer = tiny_vision.build_tokenizer("qwen3_5")
    hybrid = tiny_vision.RECIPES["qwen3_5"].build_config(len(tokenizer), tokenizer)

    (line,) = describe_linear_attention(hybrid)
    degraded = [degradation.reason for degradation in describe_slow_linear_attention(hybrid, torch.device("cuda"))]

    assert line.startswith(f"linear attention: {name}")
    assert degraded == ([] if is_installed else ["SlowLinearAttention"])
    assert list(describe_slow_linear_attention(hybrid, torch.device("cpu"))) == []
    assert list(describe_linear_attention(CONFIG)) == []
    assert list(describe_slow_linear_attention(CONFIG, torch.device("cuda"))) == []


@pytest.mark.usefixtures("fake_backends")
def test_candidates_are_compared_with_eager_for_a_model_without_sdpa() -> None:
    trial = replace(TRIAL, config=build_config_without_sdpa("gemma2"), baseline=EAGER, is_packed=False)

    choice = benchmark_backends(trial, ("failing",))

    assert choice.name == EAGER
    assert choice.reason.endswith("eager 0.00, failing fails: no kernel image is available")


@pytest.mark.parametrize(
    ("implementation", "model_type", "simulated"),
    [
        ("auto", "qwen3_moe", VARLEN),
        ("sdpa", "qwen3_moe", SDPA),
        ("flash_attention_2", "qwen3_moe", SDPA),
        ("eager", "qwen3_moe", EAGER),
        ("auto", "gemma2", EAGER),
    ],
)
def test_the_forecast_simulates_the_attention_that_is_used(
    implementation: str, model_type: str, simulated: str
) -> None:
    assert choose_simulated_attention(request(implementation), tiny_families.build_config(model_type)) == simulated
