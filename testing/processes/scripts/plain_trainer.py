"""Training script in the style of the transformers examples, which does not depend on the operator."""

import sys
import time

import torch
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments


class SlowRows(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Dataset that delays each row, so that tests can observe the training."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        time.sleep(0.1)
        tokens = torch.arange(index, index + 16)
        return {"input_ids": tokens, "labels": tokens}


model, output, steps = sys.argv[1], sys.argv[2], int(sys.argv[3])
arguments = TrainingArguments(output, max_steps=steps, logging_steps=1, per_device_train_batch_size=2, use_cpu=True)
Trainer(AutoModelForCausalLM.from_pretrained(model), arguments, train_dataset=SlowRows()).train()
