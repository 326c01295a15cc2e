"""FLOPs of a training step and peak FLOPs of a GPU; their ratio is the model FLOPs utilisation (MFU)."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from finetune_trainer.data.micro_batch import MicroBatch
from finetune_trainer.model.parameter_size import get_full_numel, get_full_shape
from finetune_trainer.model.text_part import is_inside
from finetune_trainer.vision.freeze import PEFT_PREFIX

# Dense 16-bit TFLOP/s with float32 accumulation, from the vendors' data sheets. The first name that matches the device
# name of torch applies, so "H100 PCIe" has to precede "H100".
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
    """Return the peak FLOP/s of a device; None for an unknown device or a dtype other than 16-bit."""
    if dtype not in (torch.bfloat16, torch.float16):
        return None
    return next((tera * 1e12 for name, tera in _PEAK_TERAFLOPS if _contains_gpu_name(device_name, name)), None)


def _contains_gpu_name(device_name: str, gpu_name: str) -> bool:
    """Return whether the GPU name occurs as whole words, so that A10 does not match A100."""
    return re.search(rf"(?<![A-Za-z0-9]){re.escape(gpu_name)}(?![A-Za-z0-9])", device_name) is not None


@dataclass(frozen=True)
class FlopsEstimate:
    """Model FLOPs of a training step; recomputation by activation checkpointing is not counted."""

    per_token: float
    per_attention_pair: float  # a pair is a token and one of the tokens that it attends to
    forward_multiple: float = 3.0  # FLOPs of forward and backward passes as a multiple of those of the forward passes

    def total(self, *, tokens: int, attention_pairs: int) -> float:
        """Return the FLOPs of a batch with these numbers of tokens and attention pairs."""
        return self.per_token * tokens + self.per_attention_pair * attention_pairs


def estimate_flops(model: Any, *, has_reference: bool, unused_modules: tuple[str, ...] = ()) -> FlopsEstimate:
    """Estimate the FLOPs of a forward and backward pass, plus a forward pass of the reference model if there is one.

    unused_modules: modules that text does not reach, such as the vision tower of a model of which only text is trained.

    Per token, each weight costs two FLOPs in the forward pass, two for the gradient of its input and, if it is trained,
    two for its own gradient. Only active experts count.
    """
    text = model.config.get_text_config()
    passes = 3 if has_reference else 2  # forward passes and the gradient of the inputs
    weights = list(_iterate_matmul_weights(model, _compute_active_share(text), unused_modules))
    per_token = sum(2.0 * size * (passes + trained) for size, trained in weights)
    forward_per_token = sum(2.0 * size * (passes - 1) for size, _ in weights)
    widths = sum(_compute_attention_width(layer) for layer in text.per_layer_config)
    return FlopsEstimate(
        per_token,
        per_attention_pair=4.0 * widths * (passes + 1),
        forward_multiple=per_token / max(forward_per_token, 1.0),
    )


def _compute_attention_width(layer_config: Any) -> int:
    """Return the sum of the head sizes of one layer; 0 for a model without attention."""
    heads = getattr(layer_config, "num_attention_heads", 0) or 0
    return heads * (getattr(layer_config, "head_dim", None) or layer_config.hidden_size // heads) if heads else 0


def _iterate_matmul_weights(
    model: Any, active_share: float, unused_modules: tuple[str, ...]
) -> Iterator[tuple[float, bool]]:
    """Yield size and requires_grad of each weight used in a matrix product; embedding lookups cost no FLOPs."""
    embedding = model.get_input_embeddings().weight
    output = model.get_output_embeddings()
    is_tied = output is not None and output.weight is embedding
    for name, weight in model.named_parameters():
        if len(get_full_shape(weight)) < 2 or (weight is embedding and not is_tied):
            continue
        if is_inside(name.removeprefix(PEFT_PREFIX), unused_modules):
            continue
        yield get_full_numel(weight) * (active_share if ".experts." in name else 1.0), bool(weight.requires_grad)


def _compute_active_share(text_config: Any) -> float:
    """Return the fraction of experts to which each token is routed; 1 for a dense model."""
    experts = getattr(text_config, "num_experts", None) or getattr(text_config, "num_local_experts", None)
    return getattr(text_config, "num_experts_per_tok", experts) / experts if experts else 1.0


@dataclass(frozen=True)
class MicroBatchCounts:
    """Number of samples, tokens and attention pairs in a micro-batch, without padding."""

    samples: int
    tokens: int
    shared_tokens: int  # tokens of prompts that two sequences share, which are computed once
    attention_pairs: int
    longest_sequence: int  # length of the longest sequence in tokens

    @classmethod
    def from_batch(cls, batch: MicroBatch, *, sequences_per_sample: int) -> "MicroBatchCounts":
        """Count the content of a micro-batch. sequences_per_sample: 2 for preferences."""
        return cls(
            samples=sum(count > 0 for count in batch.target_counts) // sequences_per_sample,  # excludes fillers
            tokens=sum(batch.lengths),
            shared_tokens=sum(batch.shared_lengths),
            attention_pairs=_count_attention_pairs(batch.lengths) - _count_attention_pairs(batch.shared_lengths),
            longest_sequence=max(batch.lengths),
        )


def _count_attention_pairs(lengths: Iterable[int]) -> int:
    """Return the number of pairs of a token and one that it attends to in sequences of these lengths."""
    return sum(length * (length + 1) // 2 for length in lengths)
