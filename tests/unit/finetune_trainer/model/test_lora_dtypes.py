"""Tests that the inputs of float32 adapters are not copied to float32."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from finetune_api.v1alpha1.lora import Lora
from finetune_trainer.model.lora import add_adapters, set_input_casts
from finetune_trainer.training.token_losses import compute_target_losses
from testing.models import attention_families
from testing.models.micro_batches import build_micro_batch

LORA = Lora(r=4, target_modules=("all-linear",))


def build_adapted_model() -> Any:
    model = attention_families.build_model(attention_families.CONFIGS["llama"](), dtype=torch.bfloat16)
    return add_adapters(model, LORA, seed=0).train()


@contextmanager
def count_saved_bytes() -> Iterator[list[int]]:
    """Yield a list of one number: the bytes that the forward pass keeps for the backward pass."""
    total, storages = [0], set[int]()

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in storages:
            storages.add(storage._cdata)
            total[0] += storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield total


def run_step(model: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor], int]:
    """Return the losses, the gradients of the adapters, and the bytes kept for the backward pass."""
    with count_saved_bytes() as saved, torch.autocast("cpu", dtype=torch.bfloat16):
        losses = compute_target_losses(model, build_micro_batch(range(32), range(32, 64)))
    losses.sum().backward()  # type: ignore[no-untyped-call]
    gradients = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
    return losses.detach(), gradients, saved[0]


def test_the_results_are_the_same_with_less_memory() -> None:
    with_casts, without_casts = build_adapted_model(), build_adapted_model()
    set_input_casts(with_casts, enabled=True)

    expected_losses, expected_gradients, expected_bytes = run_step(with_casts)
    losses, gradients, saved_bytes = run_step(without_casts)

    assert {weight.dtype for weight in without_casts.parameters() if weight.requires_grad} == {torch.float32}
    assert torch.equal(losses, expected_losses)
    assert gradients.keys() == expected_gradients.keys()
    assert all(torch.equal(gradients[name], gradient) for name, gradient in expected_gradients.items())
    assert saved_bytes < 0.95 * expected_bytes
