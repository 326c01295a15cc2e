"""Forecast the memory of a rank for the samples of a run, and format it for the log."""

import torch

from finetune_trainer.data.load import TrainingData
from finetune_trainer.data_sources.media import Modality
from finetune_trainer.errors import TrainerError
from finetune_trainer.memory.breakdown import MemoryBreakdown, MemoryPart
from finetune_trainer.memory.forecast import ForecastModel, forecast
from finetune_trainer.memory.vision_sample import find_text_token_id
from finetune_trainer.model.attention_backend import EAGER, SDPA
from finetune_trainer.model.load import ModelDescription
from finetune_trainer.model.varlen_attention import VARLEN
from finetune_trainer.training_plan import TrainingPlan
from finetune_trainer.units import GIB
from finetune_trainer.vision.processor import VISION_INPUTS, VisionProcessor
from finetune_trainer.vision.video_processor import Features


def forecast_rank_memory(
    plan: TrainingPlan, model_description: ModelDescription, data: TrainingData, *, on_gpu: bool
) -> MemoryBreakdown | TrainerError:
    """Forecast the memory of one rank; return the error if that fails, so that the run continues without a forecast."""
    spec = plan.spec
    pack_length = spec.dataset.max_length if spec.dataset.packing else None
    max_sample_length = pack_length or int(data.train.lengths.max())
    model = ForecastModel(
        model_description.config,
        model_description.dtype,
        model_description.vision,
        model_description.attention if model_description.attention in (EAGER, VARLEN) else SDPA,
        model_description.frozen_modules,
    )
    try:
        sample = (
            build_costliest_sample(data, model_description.vision, max_sample_length)
            if model_description.vision
            else None
        )
        result = forecast(plan, model, on_gpu=on_gpu, max_sample_length=max_sample_length, sample=sample)
    except TrainerError as error:
        return error
    if on_gpu:
        return result.rank
    # On CPU the measured peak is the peak of the whole process.
    processes = sum(part.size for part in result.node.parts if part.name == "processes")
    return MemoryBreakdown((*result.rank.parts, MemoryPart("process", processes // spec.ranks_per_node)))


def build_costliest_sample(data: TrainingData, vision: VisionProcessor, length: int) -> Features:
    """Return the row or pack with the most visual tokens, padded to `length` tokens with text tokens."""
    item = data.item_with_most_visual_tokens
    if item is None:
        sample = vision.build_dummy(Modality.IMAGE)
    else:
        sample = max(
            data.samples[item], key=lambda row: (any(name in row for name in VISION_INPUTS), len(row["input_ids"]))
        )
    text = torch.full((max(length - len(sample["input_ids"]), 0),), find_text_token_id(vision))
    vision_inputs = {name: sample[name] for name in VISION_INPUTS if name in sample}
    return {**vision_inputs, "input_ids": torch.cat((sample["input_ids"], text))}


def format_rank_forecast(forecast_result: MemoryBreakdown | TrainerError) -> str:
    """Format a forecast as one log line with the total and all parts, largest part first."""
    if isinstance(forecast_result, TrainerError):
        return f"memory per rank: no forecast: {forecast_result}"
    parts = sorted((part for part in forecast_result.parts if part.size), key=lambda part: -part.size)
    formatted = ", ".join(f"{part.name} {part.size / GIB:.2f}" for part in parts)
    return f"memory per rank: at most {forecast_result.total / GIB:.2f} GiB forecast ({formatted})"
