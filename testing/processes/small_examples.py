"""Reduce the jobs in manifests/examples, so that they run on CPUs in seconds."""

from collections.abc import Callable
from pathlib import Path

import yaml

from testing.models import tiny_text, tiny_vision
from testing.processes.local_mode import LocalJob, RawBody, write_job_file
from testing.processes.supervisors import REPOSITORY

SCRIPT = REPOSITORY / "testing" / "processes" / "scripts" / "plain_ddp.py"
SHORT_TRAINING = {"maxSteps": 2, "saveSteps": 100, "learningRate": 0.01}


def create_example_inputs(folder: Path) -> Path:
    """Create tiny models and datasets at the paths that the examples use, in one folder per volume.

    A model with a Hub id is in a folder of that name next to the job files.
    """
    text = tiny_text.build(folder / "text", rows=256, eval_rows=40)
    data, models = folder / "data", folder / "models"
    for link, target in {
        data / "models" / "Qwen2.5-7B-Instruct": text.model,
        folder / "Qwen" / "Qwen2.5-1.5B-Instruct": text.model,
        data / "train" / "rows.jsonl": text.train,
        data / "val" / "rows.jsonl": text.eval,
        data / "pairs.jsonl": tiny_text.get_preferences_path(text.train),
        data / "held_out.pairs.jsonl": tiny_text.get_preferences_path(text.eval),
        data / "dpo.jsonl": tiny_text.get_preferences_path(text.train),
        folder / "workspace" / "train_dpo.py": SCRIPT,
    }.items():
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(target)
    tiny_vision.build(models / "Qwen2-VL-7B-Instruct", "qwen2_vl")
    tiny_vision.build(folder / "OpenGVLab" / "InternVL3-8B-hf", "internvl")
    tiny_vision.build(folder / "Qwen" / "Qwen2.5-VL-7B-Instruct", "qwen2_5_vl")
    tiny_vision.write_rows(data, 24, images=lambda number: number % 3).rename(data / "vl.jsonl")
    tiny_vision.write_rows(data, 24, videos=lambda number: number % 2).rename(data / "videos.jsonl")
    return folder


def write_small_example(folder: Path, example: str, edit_spec: Callable[[RawBody], None] | None = None) -> LocalJob:
    """Write an example with at most two CPU ranks, float32 and two steps; `edit_spec` may further edit the spec."""
    body: RawBody = yaml.safe_load((REPOSITORY / "manifests" / "examples" / f"{example}.yaml").read_text())
    spec: RawBody = body["spec"]
    spec.pop("resources")
    spec["nprocPerNode"] = 2 // spec.get("numNodes", 1)
    if "command" in spec:
        spec["command"]["workingDir"] = "workspace"  # the original example uses a folder in the image
    else:
        spec["model"]["torchDtype"] = "float32"
        spec["training"] = {**spec["training"], **SHORT_TRAINING}
        spec["training"].pop("numTrainEpochs", None)
    if edit_spec:
        edit_spec(spec)
    return write_job_file(folder, body, {volume["name"]: folder / volume["name"] for volume in spec["volumes"]})
