"""What is tried before the first step leaves nothing behind."""

import random

import numpy as np
import torch

from finetune_trainer.training.base_trainer import ExactTrainer


def bare_trainer() -> ExactTrainer:
    trainer = ExactTrainer.__new__(ExactTrainer)
    trainer.model = torch.nn.Linear(2, 1)
    trainer._tallied = {"units": torch.tensor(3.0)}
    return trainer


def draw() -> tuple[float, float, float]:
    return random.random(), float(np.random.random()), float(torch.rand(()))


def test_gradients_tallies_and_draws_are_undone() -> None:
    trainer = bare_trainer()
    with trainer.rehearsing():
        expected = draw()
        trainer.tally(torch.tensor(9.0), {"rewards/margins": torch.tensor(1.0)})
        trainer.model(torch.rand(4, 2)).sum().backward()
        assert trainer.model.weight.grad is not None

    assert draw() == expected
    assert trainer._tallied == {"units": torch.tensor(3.0)}
    assert all(parameter.grad is None for parameter in trainer.model.parameters())
