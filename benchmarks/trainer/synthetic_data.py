"""Models with random weights and rows of Python's own manual, whose lengths differ as those of chats do."""

import random
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedTokenizerFast
from transformers.models.llava.processing_llava import LlavaProcessor

from benchmarks.trainer.model_shapes import Shape
from benchmarks.trainer.ours import place_in, spec_of
from benchmarks.trainer.task import Content, Task
from finetune_api.v1alpha1.job import TrainerSpec
from finetune_trainer.data.load import Data, load_data
from finetune_trainer.distributed.heartbeat_writer import Reporter
from finetune_trainer.memory.breakdown import Parts
from finetune_trainer.memory.run_forecast import expect_memory
from finetune_trainer.metrics.flops import measure_work
from finetune_trainer.model.load import describe_model
from finetune_trainer.model.lora import add_adapters
from finetune_trainer.train import tokenizing
from testing.models import tiny_text as tiny
from testing.models import tiny_vision

_MARGIN = 64  # tokens of a question and of the turns' marks
_IMAGE = (112, 84)  # pixels: 12 tokens of Qwen2-VL


@dataclass(frozen=True)
class Rows:
    """How many, how long, and where they are."""

    count: int
    longest: int
    folder: Path
    seed: int = 0


def write_model(folder: Path, shape: Shape, *, dtype: str, device: str) -> None:
    """The weights are drawn on the device."""
    tokenizer = tiny_vision.build_tokenizer(shape.family) if shape.family else tiny.build_tokenizer()
    tokenizer.model_max_length = 8192
    tokenizer.save_pretrained(folder)
    kind = AutoModelForImageTextToText if shape.family else AutoModelForCausalLM
    torch.manual_seed(0)
    with torch.device(device):
        model = kind.from_config(shape.config(tokenizer), dtype=getattr(torch, dtype))
    model.save_pretrained(folder)
    del model
    if device == "cuda":
        torch.cuda.empty_cache()  # the contenders' processes need all of it
    if shape.family:
        write_processor(folder, shape, tokenizer)


def write_processor(folder: Path, shape: Shape, tokenizer: PreTrainedTokenizerFast) -> None:
    """As each contender reads it: ours the image processor alone, the others all of it."""
    images = tiny_vision.KINDS[shape.family].processor()
    images.save_pretrained(folder)
    if shape.family == "llava":
        words = {"vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
        whole = LlavaProcessor(images, tokenizer, patch_size=14, chat_template=tokenizer.chat_template, **words)
        whole.save_pretrained(folder)


def write_rows(rows: Rows, *, method: str, sees: bool) -> None:
    """`rows.jsonl` with messages; in `columns.jsonl` the same as prompt and completion, or chosen and rejected."""
    rows.folder.mkdir(parents=True)
    draw, tokenizer = random.Random(rows.seed), tiny.build_tokenizer()
    manual = tokenizer.encode(" ".join(" ".join(topics.values()).split()))
    messages, columns = [], []
    for number in range(rows.count):
        shown = [tiny_vision.draw(rows.folder, f"{number}.png", _IMAGE, seed=number)] if sees else []
        images: dict[str, Any] = {"images": [str(rows.folder / name) for name in shown]} if shown else {}
        asked = {"role": "user", "content": f"What follows, part {number}?"}
        marked = {**asked, "content": "<image>" * len(shown) + asked["content"]}
        good, bad = ({"role": "assistant", "content": _words(tokenizer, manual, draw, rows.longest)} for _ in range(2))
        if method == "dpo":
            messages.append({"messages": [marked, good], "rejected_response": bad["content"], **images})
            columns.append({"prompt": [asked], "chosen": [good], "rejected": [bad], **images})
        else:
            messages.append({"messages": [marked, good], **images})
            columns.append({"prompt": [asked], "completion": [good], **images})
    tiny.write_jsonl(rows.folder / "rows.jsonl", messages)
    tiny.write_jsonl(rows.folder / "columns.jsonl", columns)


def _words(tokenizer: PreTrainedTokenizerFast, manual: list[int], draw: random.Random, longest: int) -> str:
    """Of lognormal length, a sixth of the longest in the median."""
    most = longest - _MARGIN
    length = max(8, min(most, int(draw.lognormvariate(0, 0.8) * most / 6)))
    start = draw.randrange(len(manual) - length)
    return str(tokenizer.decode(manual[start : start + length])).strip()


def measure_content(task: Task, folder: Path, *, forecasts: bool) -> Content:
    """As our trainer reads the rows, which is how TRL and ms-swift read them."""
    spec = TrainerSpec.model_validate(spec_of(task))
    place = place_in(folder)
    pretrained = describe_model(spec.model, torch.device("cpu"))
    reporter = Reporter(place.run.heartbeats, rank=0, local_rank=0)
    data = load_data(spec.dataset, tokenizing(spec, pretrained, place, reporter))
    lengths = _lengths(data)
    kind = AutoModelForImageTextToText if task.sees else AutoModelForCausalLM
    with torch.device("meta"):
        model = kind.from_config(pretrained.config)
        adapted = add_adapters(model, spec.lora, seed=0) if spec.lora else model
    work = measure_work(adapted, has_reference=task.method == "dpo")
    pairs = sum(length * (length + 1) // 2 for length in lengths)
    flops = work.flops(tokens=sum(lengths), pairs=pairs)
    expected = expect_memory(spec, pretrained, data, on_gpu=task.on_gpu) if forecasts else None
    forecast_bytes = expected.total if isinstance(expected, Parts) else None
    return Content(len(data.train), sum(lengths), flops, forecast_bytes)


def _lengths(data: Data) -> list[int]:
    """Of all sequences."""
    return [len(sequence["input_ids"]) for index in range(len(data.train)) for sequence in data.train[index]]
