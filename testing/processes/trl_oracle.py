"""Run trainings with TRL as a reference for the trainer's losses: `trl_oracle.py CELLS.json RESULTS.json`.

Every step uses all rows in one micro-batch, so that the loss depends neither on the order of rows nor on averaging.
"""

import json
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
import transformers
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase, Trainer
from trl.trainer.dpo_config import DPOConfig
from trl.trainer.dpo_trainer import DPOTrainer
from trl.trainer.sft_config import SFTConfig
from trl.trainer.sft_trainer import SFTTrainer

from finetune_api.v1alpha1.job import TrainerSpec
from finetune_api.v1alpha1.methods import Dpo
from finetune_trainer.model.lora import add_adapters


def train_cell(spec: TrainerSpec, folder: str) -> dict[str, list[float]]:
    """Run one training with TRL and return the logged metrics by name, with one value per step."""
    rows = [json.loads(line) for line in Path(spec.dataset.train[0].name).read_text().splitlines()]
    tokenizer = AutoTokenizer.from_pretrained(spec.model.name)
    trainer = build_trainer(spec, Dataset.from_list(rows), tokenizer, folder)
    trainer.train()
    log = [entry for entry in trainer.state.log_history if "loss" in entry]
    return {name: [entry[name] for entry in log] for name in log[0] if isinstance(log[0][name], float | int)}


def build_trainer(spec: TrainerSpec, rows: Dataset, tokenizer: PreTrainedTokenizerBase, folder: str) -> Trainer:
    arguments = build_common_arguments(spec, folder, len(rows))
    if spec.sft:
        config = SFTConfig(**arguments, completion_only_loss=True)
        return SFTTrainer(model=load_model(spec), args=config, train_dataset=rows, processing_class=tokenizer)
    assert spec.dpo
    config = DPOConfig(**arguments, **build_dpo_arguments(spec.dpo))
    reference = None if spec.lora else AutoModelForCausalLM.from_pretrained(spec.model.name)
    return DPOTrainer(
        model=load_model(spec), ref_model=reference, args=config, train_dataset=rows, processing_class=tokenizer
    )


def load_model(spec: TrainerSpec) -> torch.nn.Module:
    """Load the model; if the spec has LoRA, add adapters with the same initialization as the trainer."""
    model: torch.nn.Module = AutoModelForCausalLM.from_pretrained(spec.model.name, dtype=torch.float32)
    return add_adapters(model, spec.lora, seed=spec.training.seed) if spec.lora else model


def build_common_arguments(spec: TrainerSpec, folder: str, batch: int) -> dict[str, Any]:
    training = spec.training
    return {
        "output_dir": folder,
        "per_device_train_batch_size": batch,
        "max_steps": training.max_steps,
        "learning_rate": training.learning_rate,
        "lr_scheduler_type": training.lr_scheduler_type,
        "max_grad_norm": training.max_grad_norm,
        "max_length": None,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
    }


def build_dpo_arguments(dpo: Dpo) -> dict[str, Any]:
    losses: list[str] = [dpo.loss_type]
    weights = [1.0]
    if dpo.rpo_alpha:
        losses, weights = [dpo.loss_type, "sft"], [1.0, dpo.rpo_alpha]
    return {
        "beta": dpo.beta,
        "loss_type": losses,
        "loss_weights": weights,
        "label_smoothing": dpo.label_smoothing or 0.0,
    }


def main(cells_file: Path, results_file: Path) -> None:
    transformers.utils.logging.disable_progress_bar()
    warnings.simplefilter("ignore")
    results = {}
    for name, cell in json.loads(cells_file.read_text()).items():
        with tempfile.TemporaryDirectory() as folder:
            results[name] = train_cell(TrainerSpec.model_validate(cell), folder)
    results_file.write_text(json.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
