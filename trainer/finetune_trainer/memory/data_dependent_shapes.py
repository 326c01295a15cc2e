"""Tensors without data whose shapes depend on data all the same: what a model that sees does with its images."""

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

_BY_INDEX = (
    torch.ops.aten.index.Tensor,
    torch.ops.aten.index_put.default,
    torch.ops.aten.index_put_.default,
    torch.ops.aten._unsafe_index_put.default,
)


class KnownNumbers(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Token ids, grids and masks are few, and computed for real; all that is made of weights and pixels is not.

    To be entered inside of `fake`, which has to allow inputs that are not fake.
    """

    def __init__(self, fake: FakeTensorMode) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._fake = fake

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(isinstance(leaf, FakeTensor) for leaf in tree_leaves((args, kwargs))):
            if func in _BY_INDEX:
                args = (args[0], _numbered(args[1]), *args[2:])
            return func(*args, **kwargs)
        with unset_fake_temporarily():
            made = func(*args, **kwargs)
        return tree_map(self._without_data, made)

    def _without_data(self, leaf: Any) -> Any:
        """A single number stays known: it may decide what is done next."""
        is_large = isinstance(leaf, torch.Tensor) and leaf.is_floating_point() and leaf.numel() > 1
        return self._fake.from_tensor(leaf) if is_large else leaf


def _numbered(indices: Any) -> list[Any]:
    """With numbers in the place of masks: how many numbers there are is known."""
    found: list[Any] = []
    for index in indices:
        if isinstance(index, torch.Tensor) and index.dtype is torch.bool and not isinstance(index, FakeTensor):
            with unset_fake_temporarily():
                found += index.nonzero(as_tuple=True)
        else:
            found.append(index)
    return found
