"""Quantizes the frozen base weights to 4 bits for training adapters (QLoRA)."""

import importlib.util

import torch
from transformers import BitsAndBytesConfig, PretrainedConfig

from finetune_trainer.errors import InvalidSpec
from finetune_trainer.vision.families import VisionFamily
from finetune_trainer.vision.towers import build_on_meta

_OUTPUT_LAYER = "lm_head"


def build_nf4_config(
    compute_dtype: torch.dtype, family: VisionFamily | None, *, unquantized_modules: tuple[str, ...] = ()
) -> BitsAndBytesConfig:
    """Return the config of NF4 with double quantization (QLoRA, arXiv 2305.14314) for the language model.

    compute_dtype: dtype of matrix multiplications. unquantized_modules: further modules outside the language model.
    Raises: InvalidSpec if bitsandbytes is not installed.
    """
    if importlib.util.find_spec("bitsandbytes") is None:
        raise InvalidSpec(
            "spec.lora.quantization: this image has no bitsandbytes, which 4-bit weights need; use the trainer image of"
            " the operator's release (leave spec.image out), or leave quantization out"
        )
    towers = (*((family.vision_prefix, *family.aligner_prefixes) if family else ()), *unquantized_modules)
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=compute_dtype,
        llm_int8_skip_modules=[*towers, _OUTPUT_LAYER] if towers else None,
    )


def check_quantizable(name: str, config: PretrainedConfig) -> None:
    """Raise InvalidSpec if most weights of the model are fused experts, which bitsandbytes leaves in 16 bits."""
    model = build_on_meta(config)
    sizes = {parameter_name: parameter.numel() for parameter_name, parameter in model.named_parameters()}
    fused = [n for n, parameter in model.named_parameters() if ".experts." in n and parameter.dim() > 2]
    if fused:
        share = sum(sizes[parameter_name] for parameter_name in fused) / sum(sizes.values())
        raise InvalidSpec(
            f'spec.lora.quantization: nf4 quantizes linear layers, but the experts of model "{name}", {share:.0%} of'
            " its weights, are fused into larger tensors and would stay in 16 bits; leave quantization out, and shard"
            " the weights with fsdp or deepspeed zero3 if they do not fit"
        )


def disable_cpu_repacking(model: torch.nn.Module) -> None:
    """Prevent bitsandbytes from repacking weights on a CPU with AVX512-BF16.

    bitsandbytes repacks weights permanently in the first evaluation. Repacking rounds the quantization constants to
    16 bits, which changes further training, and fails for layers whose width is not a multiple of 64.
    """

    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False  # type: ignore[assignment]
