"""Run a vision-language model on fake tensors, with real values for the tensors that determine shapes."""

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

_INDEXING_OPS = (
    torch.ops.aten.index.Tensor,
    torch.ops.aten.index_put.default,
    torch.ops.aten.index_put_.default,
    torch.ops.aten._unsafe_index_put.default,
)


class ConcreteIntegerMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Dispatch mode with real token ids, grids and masks; tensors derived from weights and pixels stay fake.

    Enter it inside `fake_mode`, which must have allow_non_fake_inputs set.
    """

    def __init__(self, fake_mode: FakeTensorMode) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._fake_mode = fake_mode

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(isinstance(leaf, FakeTensor) for leaf in tree_leaves((args, kwargs))):
            if func in _INDEXING_OPS:
                args = (args[0], _convert_masks_to_indices(args[1]), *args[2:])
            return func(*args, **kwargs)
        with unset_fake_temporarily():
            result = func(*args, **kwargs)
        return tree_map(self._to_fake, result)

    def _to_fake(self, leaf: Any) -> Any:
        """Replace a float tensor by a fake tensor; scalars stay real, because control flow may depend on them."""
        is_large = isinstance(leaf, torch.Tensor) and leaf.is_floating_point() and leaf.numel() > 1
        return self._fake_mode.from_tensor(leaf) if is_large else leaf


def _convert_masks_to_indices(indices: Any) -> list[Any]:
    """Replace boolean masks by integer indices, because the number of indices is known."""
    converted_indices: list[Any] = []
    for index in indices:
        if isinstance(index, torch.Tensor) and index.dtype is torch.bool and not isinstance(index, FakeTensor):
            with unset_fake_temporarily():
                converted_indices += index.nonzero(as_tuple=True)
        else:
            converted_indices.append(index)
    return converted_indices
