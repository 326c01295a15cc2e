"""Compares losses and gradients that are computed in tiles with those from the logits of all tokens."""

import copy
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    GraniteConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from finetune_api.v1alpha1.lora import Lora
from finetune_trainer.model import tiled_losses
from finetune_trainer.model.lora import add_adapters
from finetune_trainer.model.tiled_losses import Targets, compute_losses, compute_losses_at_once
from testing.models import tiny_families
from testing.models.allocation_tracker import AllocationTracker

VOCABULARY = 100
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
}
SCALED: dict[str, PretrainedConfig] = {
    "granite": GraniteConfig(**SIZES, logits_scaling=8.0),
    "cohere": CohereConfig(**SIZES, logit_scale=0.5, bos_token_id=1, eos_token_id=2),
}
MODELS = (*tiny_families.CONFIGS, *SCALED)
TILE_TOKENS = 5
IDS = torch.arange(51).view(3, 17) % (VOCABULARY - 3) + 3
TARGETS = Targets(torch.tensor([*range(4, 16), *range(20, 30), 40]), torch.arange(23) + 10)
WEIGHTS = torch.linspace(0.1, 2.0, len(TARGETS.ids))  # gradients of the losses


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiled_losses, "TILE_BYTES", TILE_TOKENS * 4 * VOCABULARY)


def build_model(name: str, *, frozen_output: bool = False) -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(SCALED[name]) if name in SCALED else tiny_families.build_model(name)
    model.get_output_embeddings().requires_grad_(not frozen_output)
    return model


def compute_gradients(model: Any, losses: torch.Tensor) -> dict[str, torch.Tensor]:
    (losses * WEIGHTS).sum().backward()  # type: ignore[no-untyped-call]
    return {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}


@pytest.mark.parametrize("frozen_output", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_losses_and_gradients_are_those_from_all_logits(name: str, frozen_output: bool) -> None:
    model = build_model(name, frozen_output=frozen_output)
    reference = copy.deepcopy(model)

    losses, _ = compute_losses(model, {"input_ids": IDS, "use_cache": False}, TARGETS)
    expected, _ = compute_losses_at_once(reference, {"input_ids": IDS, "use_cache": False}, TARGETS)

    torch.testing.assert_close(losses, expected, rtol=1e-6, atol=1e-6)
    gradients, expected_gradients = compute_gradients(model, losses), compute_gradients(reference, expected)
    assert gradients.keys() == expected_gradients.keys()
    for parameter, gradient in gradients.items():
        scale = expected_gradients[parameter].abs().max()
        assert (gradient - expected_gradients[parameter]).abs().max() <= 3e-6 * scale, parameter


@pytest.mark.parametrize("frozen_output", [False, True])
def test_gradients_in_bfloat16_are_as_exact_as_those_from_all_logits(frozen_output: bool) -> None:
    """The distance from the gradients in float32 is at most a third larger."""
    model = build_model("gemma2", frozen_output=frozen_output)
    distances = []
    exact = compute_gradients(copied := copy.deepcopy(model), compute(compute_losses_at_once, copied, autocast=False))
    for function in (compute_losses, compute_losses_at_once):
        copied = copy.deepcopy(model)
        gradients = compute_gradients(copied, compute(function, copied, autocast=True))
        squares = [((gradient - exact[name]).norm() / exact[name].norm()) ** 2 for name, gradient in gradients.items()]
        distances.append(torch.stack(squares).mean().sqrt().item())

    assert 0 < distances[0] <= 1.33 * distances[1]


def compute(function: Any, model: Any, *, autocast: bool) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        losses, _ = function(model, {"input_ids": IDS, "use_cache": False}, TARGETS)
    assert losses.dtype == torch.float32
    return losses  # type: ignore[no-any-return]


def test_float16_gradients_are_scaled_before_they_are_rounded() -> None:
    """Without the scale, most gradients of a frozen output layer would be too small for float16."""
    model = build_model("qwen3_moe", frozen_output=True).half()
    layer, scale = model.get_output_embeddings(), 2.0**14
    layer.weight.data *= 1e-4
    hidden = torch.ones((40, 32), dtype=torch.float16, requires_grad=True)

    def compute_tile(tile: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(layer(tile).float(), ids, reduction="none")

    losses = tiled_losses._TiledLosses.apply(compute_tile, TILE_TOKENS, hidden, torch.arange(40))  # type: ignore[no-untyped-call]
    (scaled,) = torch.autograd.grad(losses.sum() * scale, hidden)
    (expected,) = torch.autograd.grad(compute_tile(hidden, torch.arange(40)).sum() * scale, hidden)

    torch.testing.assert_close(scaled, expected)


def test_both_passes_compute_logits_in_the_dtype_of_autocast(monkeypatch: pytest.MonkeyPatch) -> None:
    dtypes: list[torch.dtype] = []
    compute_cross_entropy = tiled_losses._compute_cross_entropy

    def record_dtype(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        dtypes.append(logits.dtype)
        return compute_cross_entropy(logits, ids)

    monkeypatch.setattr(tiled_losses, "_compute_cross_entropy", record_dtype)
    compute(compute_losses, build_model("qwen3_moe"), autocast=True).sum().backward()  # type: ignore[no-untyped-call]

    tiles = -(-len(TARGETS.ids) // TILE_TOKENS)
    assert dtypes == [torch.bfloat16] * 2 * tiles


def test_adapters_of_the_output_layer_are_trained() -> None:
    lora = Lora(r=2, target_modules=("lm_head", "q_proj"))
    model = add_adapters(build_model("qwen3_moe"), lora, seed=1)
    reference = copy.deepcopy(model)

    gradients = compute_gradients(model, compute(compute_losses, model, autocast=False))
    expected = compute_gradients(reference, compute(compute_losses_at_once, reference, autocast=False))

    assert any("lm_head" in name for name in gradients)
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("frozen_output", [False, True])
@pytest.mark.parametrize("is_training", [False, True])
def test_a_micro_batch_may_have_no_targets(frozen_output: bool, is_training: bool) -> None:
    model = build_model("qwen3_moe", frozen_output=frozen_output)
    empty = torch.zeros(0, dtype=torch.int64)

    with torch.set_grad_enabled(is_training):
        losses, _ = compute_losses(model, {"input_ids": IDS, "use_cache": False}, Targets(empty, empty))

    assert losses.shape == (0,)
    if is_training:
        losses.sum().backward()  # type: ignore[no-untyped-call]
        assert all(weight.grad is None or not weight.grad.any() for weight in model.parameters())


def test_evaluation_computes_the_losses_without_gradients() -> None:
    model = build_model("gemma2").eval()

    with torch.no_grad():
        losses, _ = compute_losses(model, {"input_ids": IDS, "use_cache": False}, TARGETS)
        expected, _ = compute_losses_at_once(model, {"input_ids": IDS, "use_cache": False}, TARGETS)

    torch.testing.assert_close(losses, expected)


def test_the_model_returns_logits_again_afterwards() -> None:
    model = build_model("gemma2").eval()
    before = model(input_ids=IDS).logits

    compute(compute_losses, model, autocast=False)

    assert torch.equal(model(input_ids=IDS).logits, before)
    assert "forward" not in vars(model.get_output_embeddings())


class ModelWithMethod(Qwen2ForCausalLM):  # type: ignore[misc]
    """Changes its logits by a method that cannot be applied to a tile."""

    def forward(self, **inputs: Any) -> Any:
        output = super().forward(**inputs)
        output.logits = output.logits - output.logits.mean(dim=1, keepdim=True)
        return output


class ModelWithFunction(Qwen2ForCausalLM):  # type: ignore[misc]
    """Changes its logits by a function that cannot be applied to a tile."""

    def forward(self, **inputs: Any) -> Any:
        output = super().forward(**inputs)
        output.logits = torch.cumsum(output.logits, dim=1)
        return output


class ModelWithoutOutputLayer(Qwen2ForCausalLM):  # type: ignore[misc]
    """Has no output layer that transformers knows."""

    def get_output_embeddings(self) -> None:
        return None


@pytest.mark.parametrize("model_class", [ModelWithMethod, ModelWithFunction, ModelWithoutOutputLayer])
def test_a_model_whose_logits_have_another_source_needs_all_logits(model_class: type[Qwen2ForCausalLM]) -> None:
    model = model_class(Qwen2Config(**SIZES))

    losses = compute(compute_losses, model, autocast=False)

    torch.testing.assert_close(losses, compute(compute_losses_at_once, model, autocast=False))


@pytest.mark.parametrize("frozen_output", [False, True])
def test_the_memory_for_logits_is_that_of_one_tile(frozen_output: bool) -> None:
    """Forward and backward pass with a vocabulary that is much larger than the rest of the model."""
    model: Any = Qwen2ForCausalLM(Qwen2Config(**{**SIZES, "vocab_size": 20_000}, tie_word_embeddings=False))
    model.requires_grad_(False)
    model.get_output_embeddings().requires_grad_(not frozen_output)
    model.get_input_embeddings().register_forward_hook(lambda _module, _inputs, output: output.requires_grad_())
    ids, targets = torch.zeros((2, 128), dtype=torch.int64), Targets(torch.arange(200), torch.arange(200))
    peaks = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiled_losses, "TILE_BYTES", 10 * 4 * 20_000)
        compute_losses(model, {"input_ids": ids}, targets)[0].sum().backward()  # type: ignore[no-untyped-call]
        for function in (compute_losses, compute_losses_at_once):
            with AllocationTracker() as tracker:
                function(model, {"input_ids": ids}, targets)[0].sum().backward()  # type: ignore[no-untyped-call]
            peaks.append(tracker.peak_bytes)
            model.zero_grad()

    weight_bytes, tile_bytes = 4 * 32 * 20_000, 10 * 4 * 20_000
    # the weight; if it is trained, also its gradient, of one tile and of all
    assert peaks[0] < (1 if frozen_output else 3) * weight_bytes + 6 * tile_bytes
    assert peaks[1] > 3 * 200 * 4 * 20_000
