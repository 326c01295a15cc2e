"""Measure the CPU memory of the tensors of a training run, between steps and at the peak of each step."""

import gc
import weakref
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import TrainerCallback


class AllocationTracker(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Tracks the storage of every tensor from its creation until it is freed.

    The current sizes are read on every access, because FSDP2 frees memory by resizing storages.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak_bytes = 0
        self._storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    @property
    def live_bytes(self) -> int:
        """Total size in bytes of all tracked storages."""
        references = list(
            self._storages.values()
        )  # copied, because threads of collectives may free a storage during the iteration
        return sum(storage.nbytes() for reference in references if (storage := reference()) is not None)

    def __torch_dispatch__(self, function: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.device.type == "cpu":
                # a DTensor has the global shape, but only its local shard uses memory
                storage = getattr(tensor, "_local_tensor", tensor).untyped_storage()
                if storage._cdata not in self._storages:
                    self._storages[storage._cdata] = weakref.ref(storage)
                    weakref.finalize(storage, self._storages.pop, storage._cdata, None)
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        return result


@dataclass
class AllocationCallback(TrainerCallback):  # type: ignore[misc]
    """Records the held and peak bytes of every step; excludes checkpoint saves between steps."""

    tracker: AllocationTracker
    held_bytes: list[int] = field(default_factory=list)
    peak_bytes: list[int] = field(default_factory=list)

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        gc.collect()
        self.tracker.peak_bytes = 0
        self.held_bytes.append(self.tracker.live_bytes)

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.peak_bytes.append(self.tracker.peak_bytes)
