"""Test that the preflight has no side effects on training."""

import random

import numpy as np
import torch

from finetune_trainer.training.base_trainer import GlobalMeanTrainer
from finetune_trainer.training.loss_averaging import MetricSums


def build_trainer_without_init() -> GlobalMeanTrainer:
    trainer = GlobalMeanTrainer.__new__(GlobalMeanTrainer)
    trainer.model = torch.nn.Linear(2, 1)
    trainer.metric_sums = MetricSums()
    trainer.accumulate_metrics(torch.tensor(3.0), {})
    return trainer


def draw_random_numbers() -> tuple[float, float, float]:
    return random.random(), float(np.random.random()), float(torch.rand(()))


def test_preflight_restores_gradients_metrics_and_random_states() -> None:
    trainer = build_trainer_without_init()
    with trainer.discard_side_effects():
        expected_numbers = draw_random_numbers()
        trainer.accumulate_metrics(torch.tensor(9.0), {"rewards/margins": torch.tensor(1.0)})
        trainer.model(torch.rand(4, 2)).sum().backward()
        assert trainer.model.weight.grad is not None

    assert draw_random_numbers() == expected_numbers
    assert trainer.metric_sums._sums == {"units": torch.tensor(3.0)}
    assert all(parameter.grad is None for parameter in trainer.model.parameters())
