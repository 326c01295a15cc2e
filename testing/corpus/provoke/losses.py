"""Errors of torch about losses, gradients and probabilities that are not finite."""

from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn


def _clip_non_finite_gradient(folder: Path) -> None:
    weight = nn.Parameter(torch.ones(1))
    weight.grad = torch.tensor([float("inf")])
    nn.utils.clip_grad_norm_([weight], 1.0, error_if_nonfinite=True)


def _differentiate_square_root_at_zero(folder: Path) -> None:
    with torch.autograd.detect_anomaly(check_nan=True):
        weight = torch.zeros(1, requires_grad=True)
        torch.autograd.backward((weight.sqrt() * 0).sum())


PROVOCATIONS: dict[str, Callable[[Path], object]] = {
    "multinomial over NaN probabilities while sampling rollouts": lambda folder: torch.multinomial(
        torch.tensor([float("nan"), 0.5]), 1
    ),
    "sqrt at 0 under detect_anomaly": _differentiate_square_root_at_zero,
    "clip_grad_norm_ with error_if_nonfinite": _clip_non_finite_gradient,
}
