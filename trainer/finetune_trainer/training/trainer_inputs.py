"""Constructor arguments that the trainers of all methods share."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from transformers import PreTrainedTokenizerBase, TrainingArguments

from finetune_trainer.checkpoint.checkpoints import Checkpoints
from finetune_trainer.data.collator import Collate, SequenceLayout
from finetune_trainer.data.load import TrainingData
from finetune_trainer.distributed.heartbeat_writer import HeartbeatWriter
from finetune_trainer.distributed.rank_context import Ranks
from finetune_trainer.training_plan import TrainingPlan
from finetune_trainer.vision.families import VisionFamily


@dataclass(frozen=True)
class TrainerInputs:
    """Constructor arguments of GlobalMeanTrainer and its subclasses."""

    plan: TrainingPlan
    model: torch.nn.Module
    reference_model: torch.nn.Module | None  # only for DPO without LoRA
    tokenizer: PreTrainedTokenizerBase
    data: TrainingData
    collate: Collate
    layout: SequenceLayout  # of the micro-batches that `collate` returns
    padded_layout: SequenceLayout | None  # alternative to a layout without padding that the user did not request
    family: VisionFamily | None  # None for a text model
    frozen_modules: tuple[str, ...]  # modules that text does not reach (spec.model.textOnly)
    args: TrainingArguments
    ranks: Ranks
    checkpoints: Checkpoints
    heartbeat: HeartbeatWriter
    is_stop_requested: Callable[[], bool]
    forecast_bytes: int | None  # forecast peak memory of a rank; only set on rank 0
    notes: Mapping[str, str]  # by subject, for log and model card: on what else the result depends
