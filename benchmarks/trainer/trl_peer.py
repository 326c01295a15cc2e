"""TRL's trainers with the same settings."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from PIL import Image
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoProcessor, AutoTokenizer, Trainer
from trl.trainer.dpo_config import DPOConfig
from trl.trainer.dpo_trainer import DPOTrainer
from trl.trainer.sft_config import SFTConfig
from trl.trainer.sft_trainer import SFTTrainer

from benchmarks.trainer.task import EPOCHS, Task


def train(task: Task) -> None:
    build_trainer(task).train()
    shutil.rmtree(task.output, ignore_errors=True)


def build_trainer(task: Task) -> Trainer:
    kind = AutoModelForImageTextToText if task.sees else AutoModelForCausalLM
    reads = AutoProcessor if task.sees else AutoTokenizer
    dtype = getattr(torch, task.dtype) if task.lora else torch.float32  # as ours: in 16 bits most updates are lost
    common: dict[str, Any] = {
        "model": kind.from_pretrained(task.model, dtype=dtype),
        "processing_class": reads.from_pretrained(task.model),
        "train_dataset": read_rows(Path(task.columns)),
        "peft_config": adapters(task) if task.lora else None,
    }
    if task.method == "dpo":
        return DPOTrainer(**common, args=DPOConfig(**arguments(task)))
    return SFTTrainer(**common, args=SFTConfig(**arguments(task), packing=task.packing))


def adapters(task: Task) -> LoraConfig:
    """Where ours are: in the language model alone."""
    inside = r".*language_model.*\.(q|k|v|o|gate|up|down)_proj" if task.sees else "all-linear"
    return LoraConfig(task_type="CAUSAL_LM", r=8, lora_alpha=32, target_modules=inside)


def read_rows(path: Path) -> Dataset:
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    for row in rows:
        if "images" in row:
            row["images"] = [Image.open(path.parent / name) for name in row["images"]]
    return Dataset.from_list(rows)


def arguments(task: Task) -> dict[str, Any]:
    return {
        "output_dir": task.output,
        "per_device_train_batch_size": task.per_device,
        "gradient_accumulation_steps": task.accumulation,
        "gradient_checkpointing": task.checkpointing,
        "num_train_epochs": EPOCHS,
        "learning_rate": 1e-4,
        "lr_scheduler_type": "constant",
        "max_length": None if task.sees else task.max_length,  # it would cut images in two
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": not task.on_gpu,
        "bf16": task.dtype == "bfloat16",
    }
