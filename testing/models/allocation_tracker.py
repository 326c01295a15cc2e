"""What a training really allocates on CPU, tensor by tensor: held between steps, and at the highest moment of one."""

import gc
import weakref
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import TrainerCallback


class Book(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Every storage from the operation that makes it to its end. Sizes are read anew: FSDP2 frees by shrinking them."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.highest = 0
        self._known: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    @property
    def live(self) -> int:
        """Bytes."""
        known = list(self._known.values())  # threads of collectives may let go of one meanwhile
        return sum(storage.nbytes() for each in known if (storage := each()) is not None)

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, torch.Tensor) and tensor.device.type == "cpu":
                # a DTensor has the shape of the whole and the memory of its piece
                storage = getattr(tensor, "_local_tensor", tensor).untyped_storage()
                if storage._cdata not in self._known:
                    self._known[storage._cdata] = weakref.ref(storage)
                    weakref.finalize(storage, self._known.pop, storage._cdata, None)
        self.highest = max(self.highest, self.live)
        return made


@dataclass
class Follow(TrainerCallback):  # type: ignore[misc]
    """Steps without what is saved between them. Bytes, by step."""

    book: Book
    held: list[int] = field(default_factory=list)
    highest: list[int] = field(default_factory=list)

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        gc.collect()
        self.book.highest = 0
        self.held.append(self.book.live)

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.highest.append(self.book.highest)
