"""Test the message of GPU out-of-memory errors."""

import torch

from finetune_trainer.memory.oom_message import build_out_of_memory_error


def test_message_contains_the_micro_batch_and_its_sample_lengths() -> None:
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])
    batch = {"input_ids": torch.zeros(2, 4, dtype=torch.int64), "attention_mask": mask}
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore")

    message = str(build_out_of_memory_error(error, batch, step=36))

    assert message == (
        "ran out of GPU memory at step 37 with a micro-batch of 2 x 4 tokens (samples of 4, 2; input_ids (2, 4),"
        " attention_mask (2, 4)); CUDA out of memory. Tried to allocate 2.00 GiB."
    )
