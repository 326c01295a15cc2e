"""Frozen weights in 4 bits, under adapters that learn."""

import importlib.util

import torch
from transformers import BitsAndBytesConfig

from finetune_trainer.errors import InvalidSpec
from finetune_trainer.vision.families import Family

_OUTPUT = "lm_head"


def four_bit(compute: torch.dtype, family: Family | None) -> BitsAndBytesConfig:
    """NormalFloat whose constants are quantized, too, as in arXiv 2305.14314. What sees is small, and keeps its bits.

    Raises InvalidSpec where bitsandbytes is missing.
    """
    if importlib.util.find_spec("bitsandbytes") is None:
        raise InvalidSpec(
            "spec.lora.quantization: this image has no bitsandbytes, which keeps weights in 4 bits; take the trainer"
            " image of the operator's release (leave spec.image out), or leave quantization out"
        )
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=compute,
        llm_int8_skip_modules=[family.vision, *family.aligner, _OUTPUT] if family else None,
    )


def keep_as_quantized(model: torch.nn.Module) -> None:
    """On CPUs that multiply bfloat16 bitsandbytes would repack weights in the first evaluation, for good.

    Their constants would be rounded to 16 bits, so that what is trained afterwards differs, and a layer whose width is
    no multiple of 64 would fail.
    """
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False  # type: ignore[assignment]
