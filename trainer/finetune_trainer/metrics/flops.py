"""Floating point operations of a step, and how many a GPU can do: together they give the model FLOPs utilisation."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from finetune_trainer.data.token_dataset import IGNORED, Features
from finetune_trainer.model.parameter_size import whole_shape, whole_size

_POSITIONS = "position_ids"  # of packed rows, where they start again with every document

# Dense 16-bit tensor operations per second with float32 sums, in 10^12, as the vendors' data sheets give them. The
# first name that is part of torch's name for the device counts, so longer names stand before their beginnings.
_PEAK_TERAFLOPS = (
    ("H100 PCIe", 756.0),
    ("H100 NVL", 835.0),
    ("H100", 989.4),
    ("H200 NVL", 835.0),
    ("H200", 989.4),
    ("H800", 989.4),
    ("H20", 148.0),
    ("GH200", 989.4),
    ("B200", 2250.0),
    ("A100", 312.0),
    ("A800", 312.0),
    ("A10G", 70.0),
    ("A10", 125.0),
    ("A30", 165.0),
    ("A40", 149.7),
    ("RTX A6000", 154.8),
    ("L40S", 362.0),
    ("L40", 181.0),
    ("L4", 121.0),
    ("RTX 3090", 71.0),
    ("RTX 4090", 165.2),
    ("RTX 5090", 209.5),
    ("V100", 125.0),
    ("T4", 65.0),
    ("MI300X", 1307.4),
    ("MI250X", 383.0),
)


def peak_flops(device_name: str, dtype: torch.dtype) -> float | None:
    """Operations per second; None where the device is not known or computes in 32 bits."""
    if dtype not in (torch.bfloat16, torch.float16):
        return None
    return next((tera * 1e12 for name, tera in _PEAK_TERAFLOPS if _names(device_name, name)), None)


def _names(device_name: str, name: str) -> bool:
    """As whole words: an A100 is no A10."""
    return re.search(rf"(?<![A-Za-z0-9]){re.escape(name)}(?![A-Za-z0-9])", device_name) is not None


@dataclass(frozen=True)
class Work:
    """Operations that the model needs; what checkpointing computes twice counts once."""

    per_token: float
    per_pair: float  # of a token and one that it attends to

    def flops(self, *, tokens: int, pairs: int) -> float:
        return self.per_token * tokens + self.per_pair * pairs


def measure_work(model: Any, *, has_reference: bool) -> Work:
    """Of a forward and a backward pass, and of the reference's forward pass where there is one.

    A weight costs two operations per token forward, two for the gradient that is handed on, and two for its own
    gradient if it learns. Of experts only those count that a token is sent to.
    """
    text = model.config.get_text_config()
    reads = 3 if has_reference else 2  # forward passes, and the gradient that is handed on
    per_token = sum(2.0 * size * (reads + learns) for size, learns in _multiplied(model, _active_share(text)))
    heads = getattr(text, "num_attention_heads", 0) or 0
    width = heads * (getattr(text, "head_dim", None) or text.hidden_size // heads) if heads else 0
    return Work(per_token, per_pair=4.0 * width * text.num_hidden_layers * (reads + 1))


def _multiplied(model: Any, active_share: float) -> Iterator[tuple[float, bool]]:
    """Size of each weight that tokens are multiplied with, and whether it learns. Looking up an embedding is free."""
    looked_up = model.get_input_embeddings().weight
    output = model.get_output_embeddings()
    is_tied = output is not None and output.weight is looked_up
    for name, weight in model.named_parameters():
        if len(whole_shape(weight)) < 2 or (weight is looked_up and not is_tied):
            continue
        yield whole_size(weight) * (active_share if ".experts." in name else 1.0), bool(weight.requires_grad)


def _active_share(text: Any) -> float:
    experts = getattr(text, "num_experts", None) or getattr(text, "num_local_experts", None)
    return getattr(text, "num_experts_per_tok", experts) / experts if experts else 1.0


@dataclass(frozen=True)
class Amount:
    """How much a micro-batch holds; padding counts nowhere."""

    samples: int
    tokens: int
    pairs: int
    longest: int  # tokens of its longest sequence

    @classmethod
    def of(cls, batch: Features, *, sequences: int) -> "Amount":
        """`sequences` make up one sample: two of a preference."""
        real = batch["attention_mask"].bool()
        if _POSITIONS in batch:
            positions = batch[_POSITIONS].where(real, -1)
        else:
            positions = torch.arange(real.shape[1], device=real.device).where(real, -1)
        teaches = (batch["labels"] != IGNORED).any(dim=1, keepdim=True)  # a filler does not
        return cls(
            samples=int(((positions == 0) & teaches).sum()) // sequences,
            tokens=int(real.sum()),
            pairs=int((positions + 1).sum()),
            longest=int(real.sum(dim=1).max()),
        )
