"""Writes what a combination needs: rows of words from Python's manual, the model, an adapter, and the job's spec."""

import json
import random
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

from testing.reference.chat import END, Row
from testing.reference.combination import Combination, Layout
from testing.reference.losses import LABEL_SMOOTHING
from testing.reference.model import build_adapter, build_model
from testing.reference.schedules import BASE_BATCH

EVALUATION_ROWS = 3
SPLIT_RATIO = 0.25
WEIGHTS = (0, 0.25, 0.5, 1)


@dataclass(frozen=True)
class JobFiles:
    """Files of a training: rows by source, evaluation rows, model, and the adapter to continue, if any."""

    sources: tuple[Path, ...]
    evaluation: Path
    model: Path
    adapter: Path | None


def write_files(options: Combination, folder: Path, *, models: Path) -> JobFiles:
    """Write all files of a combination. models: folder of the models, which combinations share."""
    folder.mkdir(parents=True, exist_ok=True)
    sources, evaluation = write_rows(options, folder)
    model = build_model(options, models)
    adapter = build_adapter(options, model, models) if options.tuner == "adapter" else None
    return JobFiles(tuple(sources), evaluation, model, adapter)


def build_spec(options: Combination, files: JobFiles, layout: Layout) -> dict[str, Any]:
    """Return the spec of the job with one of the layouts of the combination."""
    names = zip(files.sources, options.draws, strict=True)
    spec = {
        "model": {"name": str(files.model), "attnImplementation": options.attention},
        "dataset": {
            "train": [{"name": f"{file}#{count}" if count else str(file)} for file, count in names],
            "eval": [{"name": str(files.evaluation)}] if options.evaluation == "file" else None,
            "splitDatasetRatio": SPLIT_RATIO if options.evaluation == "split" else None,
            "maxLength": options.max_length,
            "overlong": options.overlong,
            "packing": options.packing,
            "numWorkers": 0,
        },
        "sft": None if options.is_dpo else {"lossOn": options.loss_on},
        "dpo": _build_dpo(options) if options.is_dpo else None,
        "lora": None if options.tuner == "full" else _build_lora(options, files),
        "training": _build_training(options, layout),
        "fsdp": {} if layout.preset == "fsdp" else None,
        "deepspeed": {"preset": layout.preset} if layout.preset.startswith("zero") else None,
        "nprocPerNode": layout.ranks,
        "output": {"persistentVolumeClaim": {"claimName": "unused"}},
    }
    return _leave_out_none(spec)


def _leave_out_none(fields: dict[str, Any]) -> dict[str, Any]:
    present = {name: value for name, value in fields.items() if value is not None}
    return {name: _leave_out_none(value) if isinstance(value, dict) else value for name, value in present.items()}


def _build_dpo(options: Combination) -> dict[str, Any]:
    return {
        "lossType": options.loss_type,
        "beta": options.beta,
        "labelSmoothing": LABEL_SMOOTHING if options.loss_type == "robust" else None,
        "rpoAlpha": options.rpo_alpha,
        "precomputeRefLogProbs": options.precompute,
    }


def _build_lora(options: Combination, files: JobFiles) -> dict[str, Any]:
    if files.adapter:
        return {"adapter": str(files.adapter), "merge": options.merge}
    shape = {"r": options.rank, "loraAlpha": options.alpha, "useRslora": options.rslora, "useDora": options.dora}
    return {**shape, "targetModules": list(options.targets), "merge": options.merge}


def _build_training(options: Combination, layout: Layout) -> dict[str, Any]:
    return {
        "maxSteps": options.steps if options.epochs is None else None,
        "numTrainEpochs": options.epochs,
        "perDeviceTrainBatchSize": layout.micro_batch,
        "gradientAccumulationSteps": layout.accumulation,
        "averageTokensAcrossDevices": not options.mean_per_rank,
        "learningRate": options.learning_rate,
        "lrScaling": {"rule": options.scaling, "baseBatchSize": BASE_BATCH} if options.scaling else None,
        "lrSchedulerType": options.schedule,
        "warmupSteps": options.warmup,
        "weightDecay": options.decay,
        "adamBeta2": options.beta2,
        "adamEpsilon": options.epsilon,
        "maxGradNorm": options.max_norm,
        "routerAuxLossCoef": options.router_coefficient,
        "gradientCheckpointing": options.checkpointing,
        "seed": options.seed,
        "saveSteps": options.resume_after if options.resume else 1000,
        "saveTotalLimit": 9,
        "preflight": {"enabled": False},
        "reportTo": ["none"],
    }


@cache
def _list_words() -> tuple[str, ...]:
    return tuple(" ".join(topics.values()).split())


def write_rows(options: Combination, folder: Path) -> tuple[list[Path], Path]:
    """Write a file per training source and one for evaluation, and return their paths."""
    source = random.Random(options.seed)
    files = [folder / f"train{number}.jsonl" for number in range(len(options.draws))]
    evaluation = folder / "eval.jsonl"
    for file in (*files, evaluation):
        count = EVALUATION_ROWS if file == evaluation else max(2, options.rows // len(files))
        rows = [_build_row(source, options, is_short=number % 2 == 0) for number in range(count)]
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return files, evaluation


def read_row(origin: str) -> Row:
    """Return the row of an origin, such as `/data/train.jsonl line 17`."""
    file, _, number = origin.rpartition(" line ")
    row: Row = json.loads(Path(file).read_text().splitlines()[int(number) - 1])
    return row


def _build_row(source: random.Random, options: Combination, *, is_short: bool) -> dict[str, Any]:
    """Return a random row; short ones fit into every maximum length."""
    longest = 4 if is_short else 16
    answers = {name: _draw_text(source, longest) for name in ("chosen", "rejected")}
    if options.dialect == "text":
        text = _draw_text(source, longest)
        border = len(text) - (source.choice((1, 2, 3)) if options.split_words else 0)
        answers = {name: f"{text[border:]} {answer}" for name, answer in answers.items()}
        answers = answers if options.is_dpo else {"completion": answers["chosen"]}
        return {"prompt": text[:border], **answers}
    messages: list[dict[str, Any]] = []
    if not is_short and source.random() < 0.5:
        messages.append({"role": "system", "content": _draw_text(source, 6)})
    for _ in range(1 if is_short else source.choice((1, 2, 3))):
        messages.append({"role": "user", "content": _draw_text(source, longest)})
        messages.append({"role": "assistant", "content": _draw_text(source, longest)})
        if options.weighted:
            messages[-1]["weight"] = source.choice(WEIGHTS)
    if options.weighted:
        messages[-1]["weight"] = source.choice(WEIGHTS[1:])
    return {"messages": messages, **({"rejected_response": answers["rejected"]} if options.is_dpo else {})}


def _draw_text(source: random.Random, longest: int) -> str:
    """Return consecutive words of the manual, which contain no special token."""
    words, count = _list_words(), source.randint(2, longest)
    start = source.randrange(len(words) - longest)
    text = " ".join(words[start : start + count])
    assert END not in text
    return text
