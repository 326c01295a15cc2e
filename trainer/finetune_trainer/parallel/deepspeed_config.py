"""Build the DeepSpeed config of a job from a preset, or validate a raw config."""

from typing import Any

from finetune_api.v1alpha1.parallelism import Deepspeed
from finetune_trainer.errors import InvalidSpec

Config = dict[str, Any]

_BUCKET_SIZE = 100_000_000  # elements per collective, 400 MB in float32
_CPU = {"device": "cpu", "pin_memory": True}
_STAGE_3 = {
    "stage": 3,
    "overlap_comm": True,
    "contiguous_gradients": True,
    "reduce_bucket_size": "auto",
    "stage3_prefetch_bucket_size": "auto",
    "stage3_param_persistence_threshold": "auto",
}
_STAGE_2 = {
    "stage": 2,
    "overlap_comm": False,  # reports of data races between the streams are open (DeepSpeed issue 5545)
    "contiguous_gradients": True,
    "reduce_scatter": True,
    "reduce_bucket_size": _BUCKET_SIZE,
    "allgather_bucket_size": _BUCKET_SIZE,
}
_PRESETS: dict[str, Config] = {
    "zero1": {**_STAGE_2, "stage": 1},
    "zero2": _STAGE_2,
    "zero2_offload": {**_STAGE_2, "offload_optimizer": _CPU},
    "zero3": _STAGE_3,
    "zero3_offload": {**_STAGE_3, "offload_optimizer": _CPU, "offload_param": _CPU},
}
# Options that other spec fields determine; transformers replaces each "auto" by the value in TrainingArguments.
_FROM_TRAINING_ARGUMENTS: Config = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    # Otherwise, stage 1 in bfloat16 adds the gradients of earlier micro-batches in each later one again: DeepSpeed 0.19
    # clears them in a hook of the engine's outputs, which does not run here.
    "bf16": {"enabled": "auto", "immediate_grad_update": True},
    "fp16": {"enabled": "auto"},
    "zero_force_ds_cpu_optimizer": False,  # torch's AdamW is as fast and needs no compiler
}
# By default DeepSpeed reduces and accumulates gradients in 16 bits, in contrast to DDP.
_FLOAT32_GRADIENTS: Config = {"data_types": {"grad_accum_dtype": "fp32"}, "communication_data_type": "fp32"}
_SPEC_FIELDS = {  # options that must not be in a raw config, with the spec field to use instead
    "optimizer": "spec.training.learningRate and weightDecay",
    "scheduler": "spec.training.lrSchedulerType and warmupSteps",
    "train_batch_size": "spec.training.globalBatchSize",
    "train_micro_batch_size_per_gpu": "spec.training.perDeviceTrainBatchSize",
    "gradient_accumulation_steps": "spec.training.gradientAccumulationSteps",
    "gradient_clipping": "spec.training.maxGradNorm",
    "bf16": "spec.model.torchDtype",
    "fp16": "spec.model.torchDtype",
    "activation_checkpointing": "spec.training.gradientCheckpointing",
}


def build_deepspeed_config(deepspeed: Deepspeed) -> Config:
    """Build the DeepSpeed config for transformers.TrainingArguments.

    Raises: InvalidSpec if a raw config has an invalid stage or sets an option that belongs to another spec field.
    """
    if deepspeed.preset is not None:
        return {**_FROM_TRAINING_ARGUMENTS, **_FLOAT32_GRADIENTS, "zero_optimization": dict(_PRESETS[deepspeed.preset])}
    config = dict(deepspeed.config or {})
    for field, spec_field in _SPEC_FIELDS.items():
        if field in config and not _is_auto(config[field]):
            raise InvalidSpec(
                f"spec.deepspeed.config.{field}: {config[field]} is set here, but belongs to {spec_field}; set it"
                ' there, and leave it out here or write "auto"'
            )
    if get_zero_stage(config) not in (1, 2, 3):
        raise InvalidSpec(
            f"spec.deepspeed.config.zero_optimization.stage: expected 1, 2 or 3, found {get_zero_stage(config)}; leave"
            " spec.deepspeed out for plain data parallelism"
        )
    return {**_FLOAT32_GRADIENTS, **config, **_FROM_TRAINING_ARGUMENTS}


def uses_float32_gradients(config: Config) -> bool:
    """Return whether DeepSpeed accumulates gradients in float32 with this config."""
    return bool(config["data_types"].get("grad_accum_dtype") == "fp32")


def is_offloaded(config: Config, option: str) -> bool:
    """Return whether states are kept in host memory. option: offload_optimizer or offload_param."""
    return str((config["zero_optimization"].get(option) or {}).get("device", "none")) != "none"


def get_zero_stage(config: Config) -> object:
    """Return the ZeRO stage of a DeepSpeed config without validating it; None if there is none."""
    section = config.get("zero_optimization")
    return section.get("stage") if isinstance(section, dict) else None


def _is_auto(value: object) -> bool:
    """Return whether the value is "auto" or a dict with only such values, as in `bf16: {enabled: auto}`."""
    return all(_is_auto(item) for item in value.values()) if isinstance(value, dict) else value == "auto"
