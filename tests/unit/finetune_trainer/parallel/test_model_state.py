"""Tests the access to the state of a model that is not sharded, with moments in float32 and in 8 bits."""

from importlib import import_module
from typing import Any

import torch

from finetune_trainer.memory.model_shape import count_eight_bit_moment_bytes
from finetune_trainer.parallel.model_state import (
    KINDS,
    EightBitStateAccess,
    TensorStateAccess,
    iterate_saved_ranges,
    restore_state,
)

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


def build_model_in_eight_bits() -> tuple[torch.nn.Sequential, torch.optim.Optimizer]:
    """Return a model whose first weight has moments in 8 bits, without a step."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(96, 96), torch.nn.Linear(96, 2))
    optimizer_class: Any = import_module("bitsandbytes.optim").AdamW
    return model, optimizer_class(model.parameters(), lr=0.01, optim_bits=8)


def take_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    torch.manual_seed(1)
    model(torch.randn(4, 96)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def test_moments_in_8_bits_are_restored_exactly() -> None:
    model, optimizer = build_model_in_eight_bits()
    take_step(model, optimizer)
    saved: dict[str, torch.Tensor] = {}
    for rank in range(WORLD_SIZE):
        access = EightBitStateAccess(optimizer, rank=rank, world_size=WORLD_SIZE)
        for key, saved_range in iterate_saved_ranges(model, access):
            parts = [saved[key]] if key in saved else []
            saved[key] = torch.cat([*parts, saved_range.values])
    restored, restored_optimizer = build_model_in_eight_bits()

    access = EightBitStateAccess(restored_optimizer, rank=0, world_size=1)
    restore_state(restored, access, lambda key, start, stop: saved[key][start:stop], step=1)
    for trained, trained_optimizer in ((model, optimizer), (restored, restored_optimizer)):
        take_step(trained, trained_optimizer)

    assert saved["state1.0.weight"].dtype is torch.uint8
    assert saved["absmax1.0.weight"].shape == (36,)
    assert saved["state1.1.weight"].dtype is torch.float32
    for expected, parameter in zip(model.parameters(), restored.parameters(), strict=True):
        assert torch.equal(parameter, expected)


def test_moments_in_8_bits_are_counted_as_bitsandbytes_allocates_them() -> None:
    model, optimizer = build_model_in_eight_bits()
    take_step(model, optimizer)

    allocated = sum(
        tensor.nbytes
        for state in optimizer.state.values()
        for name, tensor in state.items()
        if name in {"state1", "state2", "absmax1", "absmax2"}
    )

    assert count_eight_bit_moment_bytes(model) == allocated
