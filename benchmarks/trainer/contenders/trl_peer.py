"""Contender that runs TRL's trainers with the same settings."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from PIL import Image
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoProcessor,
    AutoTokenizer,
    BitsAndBytesConfig,
    Trainer,
)
from trl.trainer.dpo_config import DPOConfig
from trl.trainer.dpo_trainer import DPOTrainer
from trl.trainer.sft_config import SFTConfig
from trl.trainer.sft_trainer import SFTTrainer

from benchmarks.trainer.task import EPOCHS, Task


def train(task: Task) -> None:
    build_trainer(task).train()
    shutil.rmtree(task.output, ignore_errors=True)


def build_trainer(task: Task) -> Trainer:
    model_class = AutoModelForImageTextToText if task.is_multimodal else AutoModelForCausalLM
    processor_class = AutoProcessor if task.is_multimodal else AutoTokenizer
    # float32 for full fine-tuning, as in our trainer, because most 16-bit weight updates round to zero
    dtype = getattr(torch, task.dtype) if task.lora else torch.float32
    common: dict[str, Any] = {
        "model": model_class.from_pretrained(task.model, dtype=dtype, **build_quantization(task, dtype)),
        "processing_class": processor_class.from_pretrained(task.model),
        "train_dataset": read_rows(Path(task.columns)),
        "peft_config": build_lora_config(task) if task.lora else None,
    }
    if task.method == "dpo":
        return DPOTrainer(**common, args=DPOConfig(**build_arguments(task)))
    return SFTTrainer(**common, args=SFTConfig(**build_arguments(task), packing=task.packing))


def build_quantization(task: Task, dtype: torch.dtype) -> dict[str, Any]:
    """Return the arguments for loading the weights in nf4, with the same settings as our trainer."""
    if not task.quantization:
        return {}
    config = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_compute_dtype=dtype,
        bnb_4bit_use_double_quant=True,
    )
    return {"quantization_config": config}


def build_lora_config(task: Task) -> LoraConfig:
    """Return a LoRA config with the same target modules as our trainer, all in the language model."""
    target_modules = r".*language_model.*\.(q|k|v|o|gate|up|down)_proj" if task.is_multimodal else "all-linear"
    return LoraConfig(task_type="CAUSAL_LM", r=8, lora_alpha=32, target_modules=target_modules)


def read_rows(path: Path) -> Dataset:
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    for row in rows:
        if "images" in row:
            row["images"] = [Image.open(path.parent / name) for name in row["images"]]
    return Dataset.from_list(rows)


def build_arguments(task: Task) -> dict[str, Any]:
    return {
        "output_dir": task.output,
        "per_device_train_batch_size": task.micro_batch_size,
        "gradient_accumulation_steps": task.accumulation_steps,
        "gradient_checkpointing": task.gradient_checkpointing,
        "num_train_epochs": EPOCHS,
        "learning_rate": 1e-4,
        "lr_scheduler_type": "constant",
        "max_length": None if task.is_multimodal else task.max_length,  # truncation would split image tokens
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": not task.on_gpu,
        "bf16": task.dtype == "bfloat16",
    }
