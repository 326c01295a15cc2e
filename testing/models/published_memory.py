"""Memory measurements published by other projects, and memory forecasts of the same jobs.

Model configs are built from the sizes below, so that no downloads are needed. `tools/memory_table.py` generates the
table in docs/user-guide/memory.md from this module.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch
from transformers import AutoConfig

from finetune_api.v1alpha1.lora import Lora
from finetune_trainer.memory.breakdown import RankLayout, break_down_rank_memory
from finetune_trainer.memory.fake_step import ActivationMemory, SimulatedStep
from finetune_trainer.memory.model_shape import Architecture, measure_shape, measure_step_peak
from finetune_trainer.memory.sharded import ZeroStrategy

GB, MIB, GIB = 10**9, 2**20, 2**30
UNITS = {GB: "GB", MIB: "MiB", GIB: "GiB"}

_LLAMA = {"model_type": "llama", "max_position_embeddings": 8192}
_QWEN = {
    "model_type": "qwen2",
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
}  # the first generation of Qwen has the architecture of Qwen2
_PHI = {
    "model_type": "phi",
    "hidden_act": "gelu_pytorch_tanh",
    "vocab_size": 51200,
}  # litgpt's GELU is a single kernel


def _describe_sizes(hidden: int, layers: int, heads: int, intermediate: int, **other_fields: Any) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "intermediate_size": intermediate,
        **other_fields,
    }


MODELS: Mapping[str, dict[str, Any]] = {
    "Qwen-1.8B": {**_QWEN, **_describe_sizes(2048, 24, 16, 5504, num_key_value_heads=16, vocab_size=151936)},
    "Qwen-7B": {**_QWEN, **_describe_sizes(4096, 32, 32, 11008, num_key_value_heads=32, vocab_size=151936)},
    "Qwen-14B": {**_QWEN, **_describe_sizes(5120, 40, 40, 13696, num_key_value_heads=40, vocab_size=152064)},
    "Qwen-72B": {**_QWEN, **_describe_sizes(8192, 80, 64, 24576, num_key_value_heads=64, vocab_size=152064)},
    "Qwen2.5-7B": {**_QWEN, **_describe_sizes(3584, 28, 28, 18944, num_key_value_heads=4, vocab_size=152064)},
    "Yi-6B": {**_LLAMA, **_describe_sizes(4096, 32, 32, 11008, num_key_value_heads=4, vocab_size=64000)},
    "Yi-34B": {**_LLAMA, **_describe_sizes(7168, 60, 56, 20480, num_key_value_heads=8, vocab_size=64000)},
    "Llama-2-7B": {**_LLAMA, **_describe_sizes(4096, 32, 32, 11008, vocab_size=32000)},
    "Llama-2-13B": {**_LLAMA, **_describe_sizes(5120, 40, 40, 13824, vocab_size=32000)},
    "Llama-3-8B": {**_LLAMA, **_describe_sizes(4096, 32, 32, 14336, num_key_value_heads=8, vocab_size=128256)},
    "Llama-3.2-3B": {
        **_LLAMA,
        **_describe_sizes(
            3072, 28, 24, 8192, num_key_value_heads=8, vocab_size=128256, head_dim=128, tie_word_embeddings=True
        ),
    },
    "TinyLlama-1.1B": {**_LLAMA, **_describe_sizes(2048, 22, 32, 5632, num_key_value_heads=4, vocab_size=32000)},
    "Mistral-7B": {**_LLAMA, **_describe_sizes(4096, 32, 32, 14336, num_key_value_heads=8, vocab_size=32000)},
    "phi-1.5": {**_PHI, **_describe_sizes(2048, 24, 32, 8192, partial_rotary_factor=0.5)},
    "phi-2": {**_PHI, **_describe_sizes(2560, 32, 32, 10240, partial_rotary_factor=0.4)},
    "StableLM-alpha-3B": {
        "model_type": "gpt_neox",
        **_describe_sizes(4096, 16, 32, 16384, vocab_size=50688, use_parallel_residual=True),
    },
    "Falcon-7B": {
        "model_type": "falcon",
        "hidden_size": 4544,
        "num_hidden_layers": 32,
        "num_attention_heads": 71,
        "vocab_size": 65024,
        "multi_query": True,
        "parallel_attn": True,
    },
    "Gemma-2B": {
        "model_type": "gemma",
        **_describe_sizes(2048, 18, 8, 16384, num_key_value_heads=1, head_dim=256, vocab_size=256000),
    },
}


class MeasuredMemory(StrEnum):
    """Memory that a source measured."""

    ALLOCATED = "tensors"
    RESERVED = "tensors and the allocator's gaps"
    DEVICE = "all memory of the process"


_NOT_COUNTED = {
    MeasuredMemory.ALLOCATED: {"CUDA context", "fragmentation"},
    MeasuredMemory.RESERVED: {"CUDA context"},
    MeasuredMemory.DEVICE: set(),
}


@dataclass(frozen=True)
class PublishedSource:
    """A page with measurements, and the differences between its trainer and finetune_trainer."""

    name: str
    page: str
    unit: int  # bytes per unit of its measurements
    measured_memory: MeasuredMemory
    uses_16_bit_states: bool  # adapters, gradients and optimizer states use 16 bits, without autocast
    has_unfused_adamw: bool = False  # the optimizer step allocates a copy of the trained parameters


QWEN = PublishedSource("QwenLM/Qwen", "README.md", GB, MeasuredMemory.DEVICE, uses_16_bit_states=False)
SWIFT = PublishedSource(
    "modelscope/ms-swift",
    "docs/source/LLM/Benchmark.md",
    MIB,
    MeasuredMemory.RESERVED,
    uses_16_bit_states=False,
    has_unfused_adamw=True,
)
LITGPT = PublishedSource(
    "Lightning-AI/litgpt", "tutorials/resource-tables.md", GB, MeasuredMemory.ALLOCATED, uses_16_bit_states=True
)
LITGPT_HUB = PublishedSource(
    "Lightning-AI/litgpt", "config_hub/finetune/README.md", GB, MeasuredMemory.ALLOCATED, uses_16_bit_states=True
)
TORCHTUNE = PublishedSource("pytorch/torchtune", "README.md", GIB, MeasuredMemory.ALLOCATED, uses_16_bit_states=True)
SWIFT_EXAMPLES = PublishedSource(
    "modelscope/ms-swift", "examples/train", GIB, MeasuredMemory.DEVICE, uses_16_bit_states=False
)
SOURCES = (QWEN, SWIFT, SWIFT_EXAMPLES, LITGPT, LITGPT_HUB, TORCHTUNE)


@dataclass(frozen=True)
class PublishedRow:
    """A published memory measurement of one GPU."""

    source: PublishedSource
    model: str
    lora: Lora | None
    length: int
    published_value: float  # measurement in the source's unit
    batch_size: int = 1
    gradient_checkpointing: bool = True
    has_varied_lengths: bool = False  # most samples are shorter than `length`
    ranks: int = 1
    zero_strategy: ZeroStrategy | None = None  # None means DDP

    @property
    def published_bytes(self) -> float:
        return self.published_value * self.source.unit


def forecast_row(row: PublishedRow) -> int:
    """Return the memory forecast in bytes for a row, without the components that its source did not measure."""
    source, bf16 = row.source, torch.bfloat16
    config = AutoConfig.for_model(**MODELS[row.model])
    # ms-swift also keeps the weights in 16 bits in full fine-tuning
    uniform_dtype = source.uses_16_bit_states or row.lora is None or row.zero_strategy is not None
    architecture = Architecture(config, bf16, row.lora, uniform_dtype=uniform_dtype)
    autocast = None if uniform_dtype else bf16
    step = SimulatedStep(
        row.batch_size, row.length, 1 if row.gradient_checkpointing else None, autocast, without_savings=True
    )
    shape, peak = measure_shape(architecture), measure_step_peak(architecture, step)
    if source.has_unfused_adamw and row.zero_strategy is None and shape.trained_bytes > peak.total:
        peak = ActivationMemory(activations=shape.trained_bytes)
    layout = RankLayout(row.ranks, ranks_per_node=1, loader_workers_per_rank=0, on_gpu=True, sharding=row.zero_strategy)
    parts = break_down_rank_memory(shape, peak, layout).parts
    return sum(part.size for part in parts if part.name not in _NOT_COUNTED[source.measured_memory])


def _create_lora(r: int, *targets: str) -> Lora:
    return Lora(r=r, lora_dropout=0.05, target_modules=targets)


def _create_rows(
    source: PublishedSource, model: str, lora: Lora | None, values_by_length: Mapping[int, float]
) -> tuple[PublishedRow, ...]:
    """Create one row per maximum length; ms-swift's samples have 3234 tokens on average, so most reach 2048 tokens."""
    return tuple(
        PublishedRow(source, model, lora, length, value, has_varied_lengths=source is SWIFT and length > 2048)
        for length, value in values_by_length.items()
    )


def _create_sharded_rows(
    ranks: int, zero: ZeroStrategy, model: str, lora: Lora | None, values_by_length: Mapping[int, float]
) -> tuple[PublishedRow, ...]:
    """Create one row per length; the sum over all GPUs on Qwen's page is divided by the number of ranks."""
    return tuple(
        PublishedRow(QWEN, model, lora, length, value / ranks, ranks=ranks, zero_strategy=zero)
        for length, value in values_by_length.items()
    )


def _create_zero_strategy(stage: int, hidden_size: int) -> ZeroStrategy:
    """Return the DeepSpeed configuration that both projects use."""
    billion = 1_000_000_000
    bucket_size, bucket_count = (hidden_size**2, 1) if stage == 3 else (200_000_000, 2)
    return ZeroStrategy(stage, 2, bucket_size, bucket_count, max_live_parameters=billion, sub_group_size=billion)


_ALL_LINEAR = _create_lora(64, "all-linear")
_ATTENTION = _create_lora(8, "q_proj", "k_proj", "v_proj")
_FUSED_QKV = _create_lora(8, "query_key_value")
_QUERY_VALUE, _QUERY_VALUE_32 = _create_lora(8, "q_proj", "v_proj"), _create_lora(32, "q_proj", "v_proj")

_QWEN_ROWS = (
    *_create_rows(QWEN, "Qwen-1.8B", _ALL_LINEAR, {256: 6.7, 512: 7.4, 1024: 8.4, 2048: 11.0, 4096: 16.2, 8192: 21.8}),
    *_create_rows(QWEN, "Qwen-7B", _ALL_LINEAR, {256: 20.1, 512: 20.4, 1024: 21.5, 2048: 23.8, 4096: 29.7, 8192: 36.6}),
    *_create_rows(
        QWEN, "Qwen-14B", _ALL_LINEAR, {256: 34.6, 512: 35.1, 1024: 35.3, 2048: 37.4, 4096: 42.5, 8192: 55.2}
    ),
)
_SHARDED_ROWS = (
    *_create_sharded_rows(2, _create_zero_strategy(3, 4096), "Qwen-7B", None, {256: 139.2, 512: 148.0, 1024: 162.0}),
    *_create_sharded_rows(
        1,
        _create_zero_strategy(3, 2048),
        "Qwen-1.8B",
        None,
        {256: 43.5, 512: 43.5, 1024: 43.5, 2048: 43.5, 4096: 47.1, 8192: 48.3},
    ),
    *_create_sharded_rows(
        4,
        _create_zero_strategy(2, 4096),
        "Qwen-7B",
        _ALL_LINEAR,
        {256: 74.7, 512: 77.6, 1024: 84.9, 2048: 95.1, 4096: 121.1, 8192: 155.5},
    ),
    *_create_sharded_rows(
        4,
        _create_zero_strategy(3, 8192),
        "Qwen-72B",
        _ALL_LINEAR,
        {256: 215.4, 512: 217.7, 1024: 222.6, 2048: 228.8, 4096: 249.0, 8192: 289.2},
    ),
    PublishedRow(SWIFT_EXAMPLES, "Qwen2.5-7B", None, 8192, 54, ranks=4, zero_strategy=_create_zero_strategy(3, 3584)),
)
_SWIFT_ROWS = (
    *_create_rows(SWIFT, "Qwen-1.8B", _ATTENTION, {512: 4610, 1024: 5576, 2048: 7624, 4096: 17324, 8192: 36620}),
    *_create_rows(SWIFT, "Qwen-7B", _ATTENTION, {512: 15926, 1024: 17096, 2048: 19362, 4096: 29264, 8192: 48560}),
    *_create_rows(SWIFT, "Qwen-14B", _ATTENTION, {512: 28466, 1024: 29708, 2048: 32186, 4096: 42098, 8192: 61412}),
    *_create_rows(SWIFT, "Qwen-1.8B", None, {512: 18010, 1024: 18072, 2048: 20286, 4096: 26436, 8192: 37530}),
    *_create_rows(SWIFT, "Qwen-7B", None, {512: 75213, 1024: 75627, 2048: 76520, 4096: 78986}),
    PublishedRow(SWIFT, "Qwen-7B", _ATTENTION, 2048, 24842, batch_size=2),
    PublishedRow(SWIFT, "Qwen-7B", _ATTENTION, 2048, 34842, batch_size=4),
    PublishedRow(SWIFT, "Qwen-7B", _ATTENTION, 2048, 54844, batch_size=8),
    PublishedRow(SWIFT, "Qwen-7B", _ATTENTION, 2048, 30316, gradient_checkpointing=False),
    PublishedRow(SWIFT, "Qwen-7B", _create_lora(2, "q_proj", "k_proj", "v_proj"), 2048, 19300),
    PublishedRow(SWIFT, "Qwen-7B", _create_lora(64, "q_proj", "k_proj", "v_proj"), 2048, 20728),
    PublishedRow(SWIFT, "Qwen-7B", _create_lora(8, "all-linear"), 2048, 19670),
    PublishedRow(SWIFT, "Yi-6B", _ATTENTION, 2048, 14386),
    PublishedRow(SWIFT, "Yi-34B", _ATTENTION, 2048, 70482),
)
# length of the longest sample, on which litgpt trains first

_LITGPT_ROWS = tuple(
    PublishedRow(LITGPT, model, lora, length, published, batch_size=batch_size, gradient_checkpointing=False)
    for model, lora, length, published, batch_size in (
        ("phi-1.5", _QUERY_VALUE, 1044, 4.82, 1),
        ("phi-1.5", _QUERY_VALUE, 1044, 6.76, 2),
        ("phi-1.5", _QUERY_VALUE, 1044, 10.68, 4),
        ("StableLM-alpha-3B", _FUSED_QKV, 1034, 9.69, 1),
        ("StableLM-alpha-3B", _FUSED_QKV, 1034, 12.10, 2),
        ("StableLM-alpha-3B", _FUSED_QKV, 1034, 16.92, 4),
        ("Llama-2-7B", _QUERY_VALUE, 1304, 21.30, 1),
        ("Llama-2-7B", _QUERY_VALUE, 1304, 29.07, 2),
        ("Llama-2-13B", _QUERY_VALUE, 1304, 38.12, 1),
    )
)
_LITGPT_HUB_ROWS = tuple(
    PublishedRow(LITGPT_HUB, model, lora, 512, published, batch_size=batch_size, gradient_checkpointing=False)
    for model, lora, published, batch_size in (
        ("Falcon-7B", _create_lora(32, "query_key_value"), 16.69, 1),
        ("Gemma-2B", _create_lora(8, "all-linear"), 12.62, 2),
        ("Llama-2-7B", _QUERY_VALUE_32, 19.77, 2),
        ("Llama-3-8B", _QUERY_VALUE_32, 19.73, 1),
        ("Mistral-7B", _QUERY_VALUE_32, 20.66, 2),
        ("phi-2", _create_lora(8, "all-linear"), 13.98, 4),
        ("StableLM-alpha-3B", _create_lora(32, "query_key_value"), 8.58, 1),
        ("TinyLlama-1.1B", _create_lora(32, "all-linear"), 13.50, 8),
        ("TinyLlama-1.1B", None, 14.10, 4),
    )
)
_TORCHTUNE_ROWS = (
    PublishedRow(TORCHTUNE, "Llama-3.2-3B", None, 4096, 60.0, batch_size=2, gradient_checkpointing=False),
)
ROWS = (*_QWEN_ROWS, *_SHARDED_ROWS, *_SWIFT_ROWS, *_LITGPT_ROWS, *_LITGPT_HUB_ROWS, *_TORCHTUNE_ROWS)
