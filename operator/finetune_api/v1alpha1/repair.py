"""Defines the repair of a job: what later attempts change after an out-of-memory failure."""

from pydantic import Field

from finetune_api.v1alpha1.base import StatusModel


class Repair(StatusModel):
    """Changes after an out-of-memory failure; fields that are set override those of the spec."""

    per_device_train_batch_size: int | None = Field(default=None, description="Samples per rank and forward pass.")
    gradient_accumulation_steps: int | None = Field(
        default=None, description="Micro-batches per optimizer step and rank."
    )
    gradient_checkpointing: bool | None = Field(default=None, description="Whether activations are recomputed.")
    gradient_checkpointing_interval: int | None = Field(
        default=None, description="n if the activations of every n-th layer are recomputed."
    )
    expandable_segments: bool | None = Field(
        default=None, description="Whether torch's allocator uses expandable segments, which reduces fragmentation."
    )
    deepspeed: str | None = Field(default=None, description="DeepSpeed preset.")
    memory: str | None = Field(default=None, description="Memory limit of each node.")
    shm_size: str | None = Field(default=None, description="Size of /dev/shm.")
    num_workers: int | None = Field(default=None, description="Data loader processes per rank.")
