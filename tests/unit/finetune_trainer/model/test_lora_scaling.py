"""Tests that the scaling factor of LoRA multiplies the r values of a token, with the results of peft's own layers."""

from typing import Any

import pytest
import torch
from peft.tuners.lora.layer import LoraLayer
from torch.utils._python_dispatch import TorchDispatchMode

from finetune_api.v1alpha1.lora import Lora
from finetune_api.v1alpha1.model_source import ModelSource
from finetune_trainer.model.load import describe_model, load_weights
from finetune_trainer.model.lora import add_adapters
from finetune_trainer.training.token_losses import compute_target_losses
from testing.models import attention_families, tiny_text
from testing.models.micro_batches import build_micro_batch

BATCH = build_micro_batch(range(32), range(32, 64))


def build_model(*, dtype: torch.dtype = torch.float32, **lora: Any) -> Any:
    model = attention_families.build_model(attention_families.CONFIGS["llama"](), dtype=dtype)
    return adapt(model, **lora)


def adapt(model: Any, **lora: Any) -> Any:
    """Add adapters with an effect to the model."""
    adapted: Any = add_adapters(model, Lora(r=4, lora_alpha=12, target_modules=("all-linear",), **lora), seed=0)
    with torch.no_grad():
        for name, weight in adapted.named_parameters():
            if "lora_B" in name:
                weight += torch.randn(weight.shape, generator=torch.Generator().manual_seed(len(name))) / 10
    return adapted.train()


def use_layers_of_peft(model: Any) -> None:
    for module in model.modules():
        if isinstance(module, LoraLayer):
            module.lora_variant.clear()


class ScalarProducts(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the sizes of tensors that are multiplied by a number."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket is torch.ops.aten.mul and not (isinstance(args[1], torch.Tensor) and args[1].dim()):
            self.sizes.append(args[0].numel())
        return func(*args, **(kwargs or {}))


def run_step(model: Any, *, autocast: bool = False) -> tuple[torch.Tensor, dict[str, torch.Tensor], list[int]]:
    """Return the losses, the gradients of the adapters, and the sizes of tensors that were multiplied by a number."""
    products = ScalarProducts()
    torch.manual_seed(0)
    with products:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            losses = compute_target_losses(model, BATCH)
        losses.sum().backward()  # type: ignore[no-untyped-call]
    gradients = {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}
    model.zero_grad()
    return losses.detach(), gradients, products.sizes


@pytest.mark.parametrize(
    ("model", "tolerance", "autocast"),
    [
        pytest.param(build_model, 1e-5, False, id="float32"),
        pytest.param(lambda: build_model(dtype=torch.bfloat16), 5e-2, True, id="bfloat16"),  # 12 roundings of 0.4 %
        pytest.param(lambda: build_model(lora_dropout=0.5), 1e-5, False, id="dropout"),
        pytest.param(lambda: build_model(use_rslora=True), 1e-5, False, id="rsLoRA"),
    ],
)
def test_losses_and_gradients_are_those_of_peft(model: Any, tolerance: float, *, autocast: bool) -> None:
    adapted = model()
    losses, gradients, sizes = run_step(adapted, autocast=autocast)

    use_layers_of_peft(adapted)
    expected_losses, expected_gradients, expected_sizes = run_step(adapted, autocast=autocast)

    torch.testing.assert_close(losses, expected_losses, rtol=tolerance, atol=tolerance)
    assert gradients.keys() == expected_gradients.keys()
    for name, expected in expected_gradients.items():
        torch.testing.assert_close(
            gradients[name], expected, rtol=tolerance, atol=tolerance * float(expected.abs().max())
        )
    assert sum(sizes) < 0.3 * sum(expected_sizes)


def test_layers_of_weights_in_nf4_have_the_losses_of_peft(tmp_path: Any) -> None:
    folder = tiny_text.build(tmp_path, rows=1, eval_rows=1).model
    description = describe_model(ModelSource(name=str(folder)), torch.device("cpu"))
    adapted = adapt(load_weights(description, torch.float32, quantize=True))
    losses, _, sizes = run_step(adapted)

    use_layers_of_peft(adapted)
    expected_losses, _, expected_sizes = run_step(adapted)

    torch.testing.assert_close(losses, expected_losses, rtol=1e-6, atol=1e-6)
    assert sum(sizes) < sum(expected_sizes)


def test_layers_with_dora_are_those_of_peft() -> None:
    adapted = build_model(use_dora=True)

    names = {
        type(variant).__name__
        for module in adapted.modules()
        for variant in getattr(module, "lora_variant", {}).values()
    }

    assert names == {"DoraLinearVariant"}


def test_adapters_cannot_be_merged_without_effect() -> None:
    """The trained model is never merged: a new one reads the saved adapter. peft would merge nothing, silently."""
    with pytest.raises(NotImplementedError):
        build_model().merge_and_unload()
