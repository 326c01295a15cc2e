"""Errors of tensors, modules, losses and optimizers of torch, on a CPU."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional


def _backward_twice(folder: Path) -> None:
    loss = nn.Linear(2, 1)(torch.ones(1, 2)).exp().sum()
    for _ in range(2):
        torch.autograd.backward(loss)


def _change_activation_in_place(folder: Path) -> None:
    exponential = torch.ones(3, requires_grad=True).exp()
    exponential.add_(1)
    torch.autograd.backward(exponential.sum())


def _unscale_twice(folder: Path) -> None:
    weight = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    torch.autograd.backward(scaler.scale(weight.sum()))
    scaler.unscale_(optimizer)
    scaler.unscale_(optimizer)


def _step_scheduler_too_often(folder: Path) -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=1)
    scheduler.step()
    scheduler.step()


def _load_optimizer_state_of_another_model(folder: Path) -> None:
    state = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1).state_dict()
    torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1).load_state_dict(state)


def _load_state_of_another_module(folder: Path) -> None:
    nn.Linear(4, 4).load_state_dict({"weight": torch.zeros(5, 4), "biass": torch.zeros(4)})


def _clip_non_finite_gradient(folder: Path) -> None:
    weight = nn.Parameter(torch.ones(1))
    weight.grad = torch.tensor([float("inf")])
    nn.utils.clip_grad_norm_([weight], 1.0, error_if_nonfinite=True)


def _differentiate_square_root_at_zero(folder: Path) -> None:
    with torch.autograd.detect_anomaly(check_nan=True):
        weight = torch.zeros(1, requires_grad=True)
        torch.autograd.backward((weight.sqrt() * 0).sum())


class OneGradient(torch.autograd.Function):
    """Product of two tensors that returns the gradient of one of them."""

    @staticmethod
    def forward(ctx: Any, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:  # noqa: ARG004
        return first * second

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:  # noqa: ARG004
        return gradients[0]


def _return_too_few_gradients(folder: Path) -> None:
    ones = torch.ones(1, requires_grad=True)
    OneGradient.apply(ones, torch.ones(1, requires_grad=True)).sum().backward()  # type: ignore[no-untyped-call]


def _checkpoint_changing_function(folder: Path) -> None:
    saves = [2, 1]

    def change(values: torch.Tensor) -> torch.Tensor:
        for _ in range(saves.pop(0)):
            values = values.exp()
        return values

    ones = torch.ones(2, requires_grad=True)
    result: Any = torch.utils.checkpoint.checkpoint(change, ones, use_reentrant=False)
    result.sum().backward()


def _differentiate_reentrant_checkpoint(folder: Path) -> None:
    ones = torch.ones(2, requires_grad=True)
    result: Any = torch.utils.checkpoint.checkpoint(torch.exp, ones, use_reentrant=True)
    torch.autograd.grad(result.sum(), ones)


def _optimize_non_leaf(folder: Path) -> None:
    torch.optim.SGD([torch.ones(2, requires_grad=True) * 2], lr=0.1)


def _require_gradient_of_ids(folder: Path) -> None:
    torch.tensor([1, 2]).requires_grad_()


def _convert_tensor_with_gradient(folder: Path) -> None:
    torch.ones(2, requires_grad=True).numpy()


PROVOCATIONS: dict[str, Callable[[Path], object]] = {
    "two-layer model with wrong hidden size": lambda folder: nn.Linear(5, 2)(nn.Linear(4, 4)(torch.ones(3, 4))),
    "bce with logits, int targets of other shape": lambda folder: functional.binary_cross_entropy_with_logits(
        torch.zeros(4, 1), torch.zeros(4)
    ),
    "LayerNorm wrong normalized shape": lambda folder: nn.LayerNorm(5)(torch.ones(2, 4)),
    "backward on detached loss": lambda folder: torch.autograd.backward(torch.ones(1).sum()),
    "token id beyond vocabulary in nn.Embedding": lambda folder: nn.Embedding(4, 2)(torch.tensor([9])),
    "integer input to embedding as float": lambda folder: nn.Embedding(4, 2)(torch.ones(1)),
    "bool mask index size": lambda folder: torch.ones(4)[torch.tensor([True, False])],
    ".numpy() on tensor with grad in metric": _convert_tensor_with_gradient,
    "in-place change of an activation": _change_activation_in_place,
    ".item() on batch of losses": lambda folder: torch.ones(2).item(),
    "residual add of unequal lengths": lambda folder: torch.ones(2, 3) + torch.ones(2, 4),
    "conv channels": lambda folder: nn.Conv2d(3, 4, 3)(torch.ones(1, 1, 8, 8)),
    "cross entropy batch mismatch": lambda folder: functional.cross_entropy(
        torch.zeros(4, 2), torch.zeros(3, dtype=torch.long)
    ),
    "bf16 input into fp32 linear": lambda folder: nn.Linear(2, 2)(torch.ones(1, 2, dtype=torch.bfloat16)),
    "cat of wrong dims": lambda folder: torch.cat([torch.ones(2, 3), torch.ones(2, 4)]),
    "optimizer state of other model": _load_optimizer_state_of_another_model,
    "load_state_dict of other sizes and names": _load_state_of_another_module,
    "GradScaler unscale twice": _unscale_twice,
    "OneCycleLR stepped too often": _step_scheduler_too_often,
    "optimizer with no parameters": lambda folder: torch.optim.SGD([], lr=0.1),
    "reentrant checkpoint with autograd.grad": _differentiate_reentrant_checkpoint,
    "checkpointed function that is not deterministic": _checkpoint_changing_function,
    "multinomial over NaN probabilities while sampling rollouts": lambda folder: torch.multinomial(
        torch.tensor([float("nan"), 0.5]), 1
    ),
    "sqrt at 0 under detect_anomaly": _differentiate_square_root_at_zero,
    "clip_grad_norm_ with error_if_nonfinite": _clip_non_finite_gradient,
    "bad device string": lambda folder: torch.ones(1, device="gpu"),
    "MultiheadAttention bad head count": lambda folder: nn.MultiheadAttention(5, 2),
    "wrong call signature of forward": lambda folder: nn.Linear(2, 2)(torch.ones(1, 2), labels=None),
    "in-place on a leaf parameter": lambda folder: nn.Parameter(torch.ones(1)).add_(1),
    "BatchNorm training with one sample": lambda folder: nn.BatchNorm1d(3)(torch.ones(1, 3)),
    "reshape to wrong number of elements": lambda folder: torch.ones(12).reshape(5, -1),
    "custom autograd function returns too few gradients": _return_too_few_gradients,
    "optimizer over non-leaf": _optimize_non_leaf,
    "backward of a vector loss": lambda folder: torch.autograd.backward(torch.ones(2, requires_grad=True).exp()),
    "wrong attribute on module": lambda folder: nn.Linear(2, 2).wieght,
    "autograd.grad of unused input": lambda folder: torch.autograd.grad(
        torch.ones(1, requires_grad=True).sum(), torch.ones(1, requires_grad=True)
    ),
    "requires_grad on ids": _require_gradient_of_ids,
    "float labels in cross entropy": lambda folder: functional.cross_entropy(torch.zeros(2, 3), torch.zeros(2)),
    "negative lr": lambda folder: torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=-1),
    "view on non-contiguous": lambda folder: torch.ones(2, 3).t().view(6),
    "meta tensors moved": lambda folder: nn.Linear(2, 2, device="meta").to("cpu"),
    "autocast-less matmul of half and float": lambda folder: torch.ones(2, 2).half() @ torch.ones(2, 2),
    "cross entropy label out of range": lambda folder: functional.cross_entropy(torch.zeros(1, 3), torch.tensor([3])),
    "backward twice without retain_graph": _backward_twice,
}
