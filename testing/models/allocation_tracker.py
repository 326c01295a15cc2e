"""Measure the CPU memory of the tensors of a training run, between steps and at the peak of each step."""

import gc
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import TrainerCallback


class AllocationTracker(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Tracks the storage of every tensor from its creation until it is freed.

    Reading the sizes of all storages after each operation would take most of the time of a training. Therefore they are
    read only if an upper bound of their sum exceeds the peak: the last sum and everything allocated since then. FSDP2
    frees memory by resizing storages, and fills a storage after it has enlarged it, which counts as an allocation.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak_bytes = 0
        self._live_bytes_bound = 0
        self._storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._sizes: dict[int, int] = {}

    @property
    def live_bytes(self) -> int:
        """Total size in bytes of all tracked storages."""
        references = list(self._storages.items())  # copied, because threads of collectives may free a storage meanwhile
        storages = ((key, reference()) for key, reference in references)
        self._sizes = {key: storage.nbytes() for key, storage in storages if storage is not None}
        self._live_bytes_bound = sum(self._sizes.values())
        return self._live_bytes_bound

    def __torch_dispatch__(self, function: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for storage in iterate_storages(result):
            if storage._cdata not in self._storages:
                self._storages[storage._cdata] = weakref.ref(storage)
                self._sizes[storage._cdata] = 0
                weakref.finalize(storage, self._storages.pop, storage._cdata, None)
        for storage in iterate_storages((result, args, kwargs)):
            if storage._cdata in self._storages:
                size = storage.nbytes()
                self._live_bytes_bound += max(size - self._sizes.get(storage._cdata, 0), 0)
                self._sizes[storage._cdata] = size
        if self._live_bytes_bound > self.peak_bytes:
            self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        return result


def iterate_storages(tensors: Any) -> Iterator[torch.UntypedStorage]:
    """Yield the storages of all CPU tensors in nested containers."""
    for tensor in tree_leaves(tensors):
        if isinstance(tensor, torch.Tensor) and tensor.device.type == "cpu":
            # a DTensor has the global shape, but only its local shard uses memory
            yield getattr(tensor, "_local_tensor", tensor).untyped_storage()


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
