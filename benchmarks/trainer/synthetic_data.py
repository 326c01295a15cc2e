"""Writes models with random weights, and rows with text from the Python manual in lengths typical of chats."""

import random
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedTokenizerFast
from transformers.models.llava.processing_llava import LlavaProcessor

from benchmarks.trainer.contenders.ours import build_rank_context, build_spec
from benchmarks.trainer.model_shapes import BenchmarkModelShape
from benchmarks.trainer.task import EpochContent, MemoryForecast, Task
from finetune_api.v1alpha1.job import TrainerSpec
from finetune_trainer.data.load import TrainingData, load_data
from finetune_trainer.distributed.heartbeat_writer import HeartbeatWriter
from finetune_trainer.memory.breakdown import MemoryBreakdown
from finetune_trainer.memory.run_forecast import forecast_rank_memory
from finetune_trainer.metrics.flops import estimate_flops
from finetune_trainer.model.load import describe_model
from finetune_trainer.model.lora import add_adapters
from finetune_trainer.train import build_download_settings, build_tokenization_config
from finetune_trainer.training_plan import plan_training
from testing.models import tiny_text, tiny_vision

_MARGIN_TOKENS = 64  # number of tokens reserved for the question and the chat template
_PIXELS_PER_TOKEN = 28 * 28  # of Qwen2-VL
_MAX_POSITIONS = 32_768


@dataclass(frozen=True)
class DatasetSettings:
    """Settings of a synthetic dataset; `max_tokens` is the maximum length of a row."""

    count: int
    max_tokens: int
    folder: Path
    seed: int = 0
    image_size: tuple[int, int] | None = None  # width and height in pixels of the image of every row

    @property
    def image_tokens(self) -> int:
        width, height = self.image_size or (0, 0)
        return width * height // _PIXELS_PER_TOKEN


def write_model(folder: Path, shape: BenchmarkModelShape, *, dtype: str, device: str) -> None:
    """Write a tokenizer and a model with random weights, which are generated on the device."""
    tokenizer = tiny_vision.build_tokenizer(shape.family) if shape.family else tiny_text.build_tokenizer()
    tokenizer.model_max_length = _MAX_POSITIONS
    tokenizer.save_pretrained(folder)
    model_class = AutoModelForImageTextToText if shape.family else AutoModelForCausalLM
    torch.manual_seed(0)
    with torch.device(device):
        model = model_class.from_config(shape.build_config(tokenizer), dtype=getattr(torch, dtype))
    model.save_pretrained(folder)
    del model
    if device == "cuda":
        torch.cuda.empty_cache()  # the contenders need all GPU memory
    if shape.family:
        write_processor(folder, shape, tokenizer)


def write_processor(folder: Path, shape: BenchmarkModelShape, tokenizer: PreTrainedTokenizerFast) -> None:
    """Write the image processor for our trainer and the full processor for the other contenders."""
    images = tiny_vision.RECIPES[shape.family].processor()
    if shape.family == "qwen2_vl":
        images.size = {"shortest_edge": _PIXELS_PER_TOKEN, "longest_edge": 1024 * _PIXELS_PER_TOKEN}
    images.save_pretrained(folder)
    if shape.family == "llava":
        options = {"vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
        processor = LlavaProcessor(images, tokenizer, patch_size=14, chat_template=tokenizer.chat_template, **options)
        processor.save_pretrained(folder)


def write_rows(rows: DatasetSettings, *, method: str) -> None:
    """Write the rows twice: as messages to rows.jsonl, and with the columns of TRL to columns.jsonl."""
    rows.folder.mkdir(parents=True)
    random_source, tokenizer = random.Random(rows.seed), tiny_text.build_tokenizer()
    manual_tokens = tokenizer.encode(" ".join(" ".join(topics.values()).split()))
    messages, columns = [], []
    for number in range(rows.count):
        image_names = (
            [tiny_vision.write_image(rows.folder, f"{number}.png", rows.image_size, seed=number)]
            if rows.image_size
            else []
        )
        images: dict[str, Any] = {"images": [str(rows.folder / name) for name in image_names]} if image_names else {}
        question = {"role": "user", "content": f"What follows, part {number}?"}
        question_with_placeholders = {**question, "content": "<image>" * len(image_names) + question["content"]}
        max_tokens = rows.max_tokens - rows.image_tokens
        texts = (_draw_random_text(tokenizer, manual_tokens, random_source, max_tokens) for _ in range(2))
        chosen_message, rejected_message = ({"role": "assistant", "content": text} for text in texts)
        if method == "dpo":
            messages.append(
                {
                    "messages": [question_with_placeholders, chosen_message],
                    "rejected_response": rejected_message["content"],
                    **images,
                }
            )
            columns.append({"prompt": [question], "chosen": [chosen_message], "rejected": [rejected_message], **images})
        else:
            messages.append({"messages": [question_with_placeholders, chosen_message], **images})
            columns.append({"prompt": [question], "completion": [chosen_message], **images})
    tiny_text.write_jsonl(rows.folder / "rows.jsonl", messages)
    tiny_text.write_jsonl(rows.folder / "columns.jsonl", columns)


def _draw_random_text(
    tokenizer: PreTrainedTokenizerFast, manual_tokens: list[int], random_source: random.Random, max_tokens: int
) -> str:
    """Return a text whose length is drawn from a lognormal distribution with a sixth of the maximum as its median."""
    max_length = max_tokens - _MARGIN_TOKENS
    length = max(8, min(max_length, int(random_source.lognormvariate(0, 0.8) * max_length / 6)))
    start = random_source.randrange(len(manual_tokens) - length)
    return str(tokenizer.decode(manual_tokens[start : start + length])).strip()


def measure_content(task: Task, folder: Path, *, forecasts_memory: bool) -> EpochContent:
    """Return the number of rows, tokens and FLOPs of one epoch.

    The numbers are the same for all contenders, because TRL and ms-swift tokenize the rows like our trainer.
    """
    spec = TrainerSpec.model_validate(build_spec(task))
    context = build_rank_context(folder)
    model_description = describe_model(spec.model, torch.device("cpu"))
    reporter = HeartbeatWriter(context.run.heartbeats, rank=0, local_rank=0)
    downloads = build_download_settings(spec, context, reporter)
    data = load_data(spec.dataset, build_tokenization_config(spec, model_description, context, downloads))
    lengths = _measure_lengths(data)
    model_class = AutoModelForImageTextToText if task.is_multimodal else AutoModelForCausalLM
    with torch.device("meta"):
        model = model_class.from_config(model_description.config)
        adapted_model = add_adapters(model, spec.lora, seed=0) if spec.lora else model
    flops_model = estimate_flops(adapted_model, has_reference=task.method == "dpo")
    attention_pairs = sum(length * (length + 1) // 2 for length in lengths)
    flops = flops_model.total(tokens=sum(lengths), attention_pairs=attention_pairs)
    plan = plan_training(spec, world_size=spec.world_size)
    forecast = forecast_rank_memory(plan, model_description, data, on_gpu=task.on_gpu) if forecasts_memory else None
    memory = summarise_forecast(forecast) if isinstance(forecast, MemoryBreakdown) else None
    return EpochContent(len(data.train), sum(lengths), flops, memory)


def summarise_forecast(forecast: MemoryBreakdown) -> MemoryForecast:
    """Return the forecast of what torch's counters contain: neither includes the memory of CUDA and NCCL."""
    sizes = {part.name: part.size for part in forecast.parts}
    reserved = forecast.total - sizes.get("CUDA context", 0) - sizes.get("NCCL buffers", 0) - sizes.get("process", 0)
    return MemoryForecast(forecast.total, reserved - sizes.get("fragmentation", 0), reserved)


def _measure_lengths(data: TrainingData) -> list[int]:
    """Return the lengths of all sequences in tokens."""
    return [len(sequence["input_ids"]) for index in range(len(data.train)) for sequence in data.train[index]]
