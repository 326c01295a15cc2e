"""The examples of manifests/examples, made smaller in size and in nothing else, so that CPUs run them in seconds."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from testing.models import tiny_text as tiny
from testing.models import tiny_vision
from testing.processes.local_mode import LocalJob, write_body
from testing.processes.supervisors import REPOSITORY

SCRIPT = REPOSITORY / "testing" / "processes" / "scripts" / "plain_ddp.py"
SMALL = {"maxSteps": 2, "saveSteps": 100, "learningRate": 0.01}

Raw = dict[str, Any]


def lay_out(folder: Path) -> Path:
    """Tiny models and rows at the paths that the examples name, below a folder per mount; Hub ids beside the jobs."""
    text = tiny.build(folder / "text", rows=256, eval_rows=40)
    data, models = folder / "data", folder / "models"
    for link, target in {
        data / "models" / "Qwen2.5-7B-Instruct": text.model,
        folder / "Qwen" / "Qwen2.5-1.5B-Instruct": text.model,
        data / "train" / "rows.jsonl": text.train,
        data / "val" / "rows.jsonl": text.eval,
        data / "pairs.jsonl": tiny.pairs(text.train),
        data / "held_out.pairs.jsonl": tiny.pairs(text.eval),
        data / "dpo.jsonl": tiny.pairs(text.train),
        folder / "workspace" / "train_dpo.py": SCRIPT,
    }.items():
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(target)
    tiny_vision.build(models / "Qwen2-VL-7B-Instruct", "qwen2_vl")
    tiny_vision.build(folder / "OpenGVLab" / "InternVL3-8B-hf", "internvl")
    tiny_vision.build(folder / "Qwen" / "Qwen2.5-VL-7B-Instruct", "qwen2_5_vl")
    tiny_vision.rows(data, 24, images=lambda number: number % 3).rename(data / "vl.jsonl")
    tiny_vision.rows(data, 24, videos=lambda number: number % 2).rename(data / "videos.jsonl")
    return folder


def shrink(folder: Path, example: str, change: Callable[[Raw], None] | None = None) -> LocalJob:
    """Two processes at most instead of GPUs, float32, two steps; `change` may do more to the spec."""
    body: Raw = yaml.safe_load((REPOSITORY / "manifests" / "examples" / f"{example}.yaml").read_text())
    spec: Raw = body["spec"]
    spec.pop("resources")
    spec["nprocPerNode"] = 2 // spec.get("numNodes", 1)
    if "command" in spec:
        spec["command"]["workingDir"] = "workspace"  # a folder of the image
    else:
        spec["model"]["torchDtype"] = "float32"
        spec["training"] = {**spec["training"], **SMALL}
        spec["training"].pop("numTrainEpochs", None)
    if change:
        change(spec)
    return write_body(folder, body, {volume["name"]: folder / volume["name"] for volume in spec["volumes"]})
