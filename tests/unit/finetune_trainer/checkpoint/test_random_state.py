"""Tests saving and restoring the states of random number generators."""

import random
from pathlib import Path

import numpy as np
import torch

from finetune_trainer.checkpoint.random_state import random_state, restore_random_state


def test_random_numbers_continue_from_the_restored_state(tmp_path: Path) -> None:
    torch.save(random_state(), tmp_path / "state.pt")
    expected = random.random(), np.random.rand(), torch.rand(1).item()

    restore_random_state(torch.load(tmp_path / "state.pt", weights_only=True))

    assert (random.random(), np.random.rand(), torch.rand(1).item()) == expected
