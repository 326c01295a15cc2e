"""A training script as transformers' own examples are: a Trainer, and nothing that says where it runs."""

import sys
import time

import torch
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments


class Rows(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """As slow as real rows, or all steps of so small a model are done before anybody looks."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        time.sleep(0.1)
        words = torch.arange(index, index + 16)
        return {"input_ids": words, "labels": words}


model, output, steps = sys.argv[1], sys.argv[2], int(sys.argv[3])
arguments = TrainingArguments(output, max_steps=steps, logging_steps=1, per_device_train_batch_size=2, use_cpu=True)
Trainer(AutoModelForCausalLM.from_pretrained(model), arguments, train_dataset=Rows()).train()
