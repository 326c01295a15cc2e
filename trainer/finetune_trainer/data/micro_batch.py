"""A collated micro-batch: the inputs of the model, the target tokens, and the lengths of the sequences."""

from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch

SkippedRows = dict[tuple[str, int], str]  # error messages by dataset (train or eval) and index of the row


@dataclass(frozen=True)
class TargetTokens:
    """Tokens to predict, ordered by sequence and position; all tensors are (targets,)."""

    positions: torch.Tensor  # indices of their predecessors in the flattened input ids
    ids: torch.Tensor
    sequences: torch.Tensor  # index of the sequence that contains the token
    weights: torch.Tensor | None = None  # None: all are 1


@dataclass(frozen=True)
class MicroBatch:
    """A micro-batch of one rank. In a batch of preference pairs, all chosen sequences precede all rejected ones.

    A sequence is a row, a completion of a pair, or a row of a pack. Since the data loader finds the targets, the
    training process does not wait for the GPU to find them.
    """

    inputs: dict[str, Any]  # arguments of the forward pass
    targets: TargetTokens
    lengths: tuple[int, ...]  # number of tokens of each sequence, with its prompt and without padding
    target_counts: tuple[int, ...]  # number of target tokens of each sequence; 0 for fillers
    shared_lengths: tuple[int, ...] = ()  # number of tokens of each prompt that both completions of a pair share
    reference_logps: torch.Tensor | None = None  # log-probabilities under DPO's reference model, (sequences,)
    pack_mask: torch.Tensor | None = None  # (batch, seq), 0: padding of a pack; None without such padding
    skipped_rows: SkippedRows = field(default_factory=dict)  # found while the micro-batch was loaded

    @property
    def real_token_count(self) -> int:
        """Number of tokens in sequences with targets, which excludes padding and fillers."""
        return sum(length for length, targets in zip(self.lengths, self.target_counts, strict=True) if targets)

    def pin_memory(self) -> "MicroBatch":
        """Return a copy in page-locked memory, which torch's data loader requests on a host with a GPU."""
        return self._map_tensors(lambda tensor: tensor.pin_memory())

    def to(self, device: torch.device, *, pixel_dtype: torch.dtype | None = None) -> "MicroBatch":
        """Return a copy on the device; the process does not wait for copies from page-locked memory.

        pixel_dtype: dtype of the pixel inputs, if it differs from theirs.
        """
        moved = self._map_tensors(lambda tensor: tensor.to(device, non_blocking=True))
        if pixel_dtype is None:
            return moved
        pixels = {
            name: value.to(pixel_dtype) for name, value in moved.inputs.items() if name.startswith("pixel_values")
        }
        return replace(moved, inputs={**moved.inputs, **pixels})

    def _map_tensors(self, function: Callable[[torch.Tensor], torch.Tensor]) -> "MicroBatch":
        def apply(value: Any) -> Any:
            return function(value) if isinstance(value, torch.Tensor) else value

        return replace(
            self,
            inputs={name: apply(value) for name, value in self.inputs.items()},
            targets=TargetTokens(*(apply(getattr(self.targets, field.name)) for field in fields(self.targets))),
            reference_logps=apply(self.reference_logps),
            pack_mask=apply(self.pack_mask),
        )
