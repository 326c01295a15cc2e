"""Captures and restores the states of all random number generators of a rank."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import torch


def random_state() -> dict[str, Any]:
    """Return the states of all random number generators in types that torch.load(weights_only=True) accepts."""
    name, keys, position, has_gauss, cached = np.random.get_state()
    return {
        "python": random.getstate(),
        "numpy": (name, torch.from_numpy(np.asarray(keys, dtype=np.int64)), position, has_gauss, cached),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
    }


def restore_random_state(state: dict[str, Any]) -> None:
    """Restore the states of all random number generators."""
    random.setstate(state["python"])
    name, keys, *position = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *position))
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def get_random_state_path(folder: Path, rank: int) -> Path:
    """Return the path of the random state of a rank in a checkpoint folder."""
    return folder / f"random-{rank:05d}.pt"
