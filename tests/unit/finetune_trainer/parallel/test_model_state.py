"""Tests the access to the state of a model that is not sharded."""

import torch

from finetune_trainer.parallel.model_state import KINDS, TensorStateAccess, iterate_saved_ranges, restore_state

WORLD_SIZE = 3


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


def join_saved_ranges(model: torch.nn.Module, optimizer: torch.optim.AdamW) -> dict[str, torch.Tensor]:
    """Return the flattened tensors that WORLD_SIZE ranks save together; no element may be saved twice."""
    tensors: dict[str, torch.Tensor] = {}
    for rank in range(WORLD_SIZE):
        access = TensorStateAccess(optimizer, rank=rank, world_size=WORLD_SIZE)
        for key, saved_range in iterate_saved_ranges(model, access):
            assert saved_range.start == tensors.get(key, torch.empty(0)).numel()
            tensors[key] = torch.cat([tensors.get(key, torch.empty(0)), saved_range.values])
    return tensors


def test_all_ranks_together_save_each_element_once() -> None:
    model, optimizer = build_trained_model()

    saved = join_saved_ranges(model, optimizer)

    assert set(saved) == {f"{kind}.{layer}.weight" for kind in KINDS for layer in (0, 1)}
    for layer, parameter in enumerate(model.parameters()):
        assert torch.equal(saved[f"weight.{layer}.weight"].view(2, 2), parameter)


def test_the_moments_of_a_parameter_without_gradients_are_saved_as_zeros() -> None:
    model, optimizer = build_trained_model()

    saved = join_saved_ranges(model, optimizer)

    assert saved["exp_avg.0.weight"].abs().min() > 0
    for moment in ("exp_avg", "exp_avg_sq"):
        assert torch.equal(saved[f"{moment}.1.weight"], torch.zeros(4))


def test_the_state_is_restored() -> None:
    model, optimizer = build_trained_model()
    saved = join_saved_ranges(model, optimizer)
    restored, restored_optimizer = build_trained_model()
    with torch.no_grad():
        get_unused_weight(restored).zero_()

    access = TensorStateAccess(restored_optimizer, rank=0, world_size=1)
    restore_state(restored, access, lambda key, start, stop: saved[key][start:stop], step=7)

    for expected, parameter in zip(model.parameters(), restored.parameters(), strict=True):
        assert torch.equal(parameter, expected)
        assert restored_optimizer.state[parameter]["step"] == 7
    used, unused = restored.parameters()
    assert torch.equal(restored_optimizer.state[used]["exp_avg"].view(-1), saved["exp_avg.0.weight"])
    assert torch.equal(restored_optimizer.state[unused]["exp_avg"], torch.zeros(2, 2))
