"""Test the message of GPU out-of-memory errors."""

import torch

from finetune_trainer.memory.oom_message import build_out_of_memory_error
from testing.models.micro_batches import build_micro_batch


def test_message_contains_the_micro_batch_and_its_sample_lengths() -> None:
    batch = build_micro_batch([1, 2], [1, 2, 3, 4])
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore")

    message = str(build_out_of_memory_error(error, batch, step=36))

    assert message == (
        "ran out of GPU memory at step 37 with a micro-batch of 2 sequences in 2 x 4 tokens (longest: 4, 2;"
        " input_ids (2, 4), attention_mask (2, 4)); CUDA out of memory. Tried to allocate 2.00 GiB."
    )
