"""Describe the parallelism of a spec, and decide whether its checkpoints are written asynchronously."""

from finetune_api.v1alpha1.job import TrainerSpec
from finetune_trainer.parallel.deepspeed_config import build_deepspeed_config, is_offloaded


def describe_parallelism(spec: TrainerSpec) -> str:
    """Return ddp, fsdp2 or deepspeed with its preset, for the log."""
    if spec.deepspeed is not None:
        return f"deepspeed {spec.deepspeed.preset or 'with a custom config'}"
    return "fsdp2" if spec.fsdp is not None else "ddp"


def saves_asynchronously(spec: TrainerSpec) -> bool:
    """Return whether training continues while a checkpoint is written."""
    if spec.training.async_checkpoints is not None:
        return spec.training.async_checkpoints
    return spec.lora is None and not _offloads_optimizer(spec)


def _offloads_optimizer(spec: TrainerSpec) -> bool:
    """Return whether optimizer states are in host memory, where a copy for a checkpoint may not fit."""
    if spec.deepspeed is not None:
        return is_offloaded(build_deepspeed_config(spec.deepspeed), "offload_optimizer")
    return spec.fsdp is not None and spec.fsdp.cpu_offload
