"""Tests saving and restoring the state of parameters that have had no gradient."""

from pathlib import Path

import torch

from finetune_trainer.parallel.full_state import TensorStateAccess, gather_state, restore_state, write_state


def build_trained_model() -> tuple[torch.nn.ModuleList, torch.optim.AdamW]:
    """Return a model after one step in which only its first layer had a gradient."""
    model = torch.nn.ModuleList([torch.nn.Linear(2, 2, bias=False), torch.nn.Linear(2, 2, bias=False)])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model[0](torch.ones(2)).sum().backward()
    optimizer.step()
    return model, optimizer


def get_unused_weight(model: torch.nn.ModuleList) -> torch.nn.Parameter:
    _used, unused = model.parameters()
    return unused


def test_the_moments_of_a_parameter_without_gradients_are_saved_as_zeros() -> None:
    model, optimizer = build_trained_model()

    state = gather_state(model, TensorStateAccess(optimizer), keep_result=True)

    assert state["exp_avg.0.weight"].abs().min() > 0
    for moment in ("exp_avg", "exp_avg_sq"):
        assert torch.equal(state[f"{moment}.1.weight"], torch.zeros(2, 2))
    assert torch.equal(state["weight.1.weight"], get_unused_weight(model))


def test_a_parameter_without_gradients_is_restored(tmp_path: Path) -> None:
    model, optimizer = build_trained_model()
    write_state(gather_state(model, TensorStateAccess(optimizer), keep_result=True), tmp_path)
    restored, restored_optimizer = build_trained_model()
    with torch.no_grad():
        get_unused_weight(restored).zero_()

    restore_state(restored, TensorStateAccess(restored_optimizer), tmp_path, step=1)

    assert torch.equal(get_unused_weight(restored), get_unused_weight(model))
    assert torch.equal(restored_optimizer.state[get_unused_weight(restored)]["exp_avg"], torch.zeros(2, 2))
