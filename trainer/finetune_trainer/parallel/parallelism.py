"""Describe the parallelism of a spec: DDP, FSDP2 or DeepSpeed."""

from finetune_api.v1alpha1.job import TrainerSpec


def describe_parallelism(spec: TrainerSpec) -> str:
    """Return ddp, fsdp2 or deepspeed with its preset, for the log."""
    if spec.deepspeed is not None:
        return f"deepspeed {spec.deepspeed.preset or 'with a custom config'}"
    return "fsdp2" if spec.fsdp is not None else "ddp"
