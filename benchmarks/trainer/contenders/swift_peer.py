"""Contender that runs ms-swift with the same settings, passed as command-line flags."""

import shutil
import warnings

from swift.pipelines import rlhf_main, sft_main

from benchmarks.trainer.task import EPOCHS, Task

MODEL_TYPES = {"": "qwen2", "qwen2_vl": "qwen2_vl", "llava": "llava1_5_hf"}

warnings.simplefilter("ignore")


def train(task: Task) -> None:
    flags = [argument for name, value in build_flags(task).items() for argument in (f"--{name}", value)]
    if task.method == "dpo":
        rlhf_main(["--rlhf_type", "dpo", "--beta", "0.1", *flags])
    else:
        sft_main(flags)
    shutil.rmtree(task.output, ignore_errors=True)


def build_flags(task: Task) -> dict[str, str]:
    return {
        "model": task.model,
        "model_type": MODEL_TYPES[task.family],
        "template": MODEL_TYPES[task.family] if task.is_multimodal else "chatml",
        "template_backend": "swift" if task.is_multimodal else "jinja",  # the jinja backend inserts no image tokens
        "torch_dtype": task.dtype,
        "dataset": task.rows,
        "split_dataset_ratio": "0",
        "tuner_type": "lora" if task.lora else "full",
        "lora_rank": "8",
        "lora_alpha": "32",
        "lora_dropout": "0",
        "packing": _format_flag(task.packing),
        "max_length": str(task.max_length),
        "per_device_train_batch_size": str(task.micro_batch_size),
        "gradient_accumulation_steps": str(task.accumulation_steps),
        "gradient_checkpointing": _format_flag(task.gradient_checkpointing),
        "num_train_epochs": str(EPOCHS),
        "learning_rate": "1e-4",
        "lr_scheduler_type": "constant",
        "warmup_ratio": "0",
        "dataloader_num_workers": "0",
        "logging_steps": "1",
        "save_strategy": "no",
        "report_to": "none",
        "use_cpu": _format_flag(not task.on_gpu),
        "output_dir": task.output,
    }


def _format_flag(is_set: bool) -> str:
    return "true" if is_set else "false"
