"""Quantizes the frozen base weights to 4 bits for training adapters (QLoRA)."""

import importlib.util

import torch
from transformers import BitsAndBytesConfig

from finetune_trainer.errors import InvalidSpec
from finetune_trainer.vision.families import VisionFamily

_OUTPUT_LAYER = "lm_head"


def build_nf4_config(compute_dtype: torch.dtype, family: VisionFamily | None) -> BitsAndBytesConfig:
    """Return the config of NF4 with double quantization (QLoRA, arXiv 2305.14314) for the language model.

    compute_dtype: dtype of matrix multiplications.
    Raises: InvalidSpec if bitsandbytes is not installed.
    """
    if importlib.util.find_spec("bitsandbytes") is None:
        raise InvalidSpec(
            "spec.lora.quantization: this image has no bitsandbytes, which 4-bit weights need; use the trainer image of"
            " the operator's release (leave spec.image out), or leave quantization out"
        )
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=compute_dtype,
        llm_int8_skip_modules=[family.vision_prefix, *family.aligner_prefixes, _OUTPUT_LAYER] if family else None,
    )


def disable_cpu_repacking(model: torch.nn.Module) -> None:
    """Prevent bitsandbytes from repacking weights on a CPU with AVX512-BF16.

    bitsandbytes repacks weights permanently in the first evaluation. Repacking rounds the quantization constants to
    16 bits, which changes further training, and fails for layers whose width is not a multiple of 64.
    """

    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False  # type: ignore[assignment]
