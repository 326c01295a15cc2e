"""Load models as the ranks of an FSDP2 job do, and measure the host memory of each rank: `measure_loading.py FOLDER`.

FOLDER contains one folder per model. Each rank writes a file RANK.json there, with one entry per model: bytes of the
weights, resident bytes that loading added, the sum of each buffer, and whether the embeddings are tied; or the error.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from finetune_api.v1alpha1.model_source import ModelSource
from finetune_trainer.errors import TrainerError
from finetune_trainer.model.load import describe_model, load_weights
from finetune_trainer.model.weight_loading import WeightLoading
from testing.processes.anonymous_memory import read_anonymous_bytes


def measure(folder: Path) -> dict[str, Any]:
    """Load the model in the folder, and describe the result."""
    cpu = torch.device("cpu")
    model_description = describe_model(ModelSource(name=str(folder)), cpu)
    before = read_anonymous_bytes()
    try:
        model: Any = load_weights(model_description, torch.float32, WeightLoading(cpu, rank_zero_only=True))
    except TrainerError as error:
        return {"error": f"{type(error).__name__}: {error}"}
    return {
        "weight_bytes": sum(parameter.nbytes for parameter in model.parameters()),
        "added_bytes": read_anonymous_bytes() - before,
        "buffers": {name: buffer.double().sum().item() for name, buffer in model.named_buffers()},
        "is_tied": model.get_input_embeddings().weight is model.get_output_embeddings().weight,
    }


if __name__ == "__main__":
    dist.init_process_group("gloo")
    root = Path(sys.argv[1])
    results = {path.name: measure(path) for path in sorted(root.iterdir()) if path.is_dir()}
    (root / f"{dist.get_rank()}.json").write_text(json.dumps(results))
    dist.destroy_process_group()
