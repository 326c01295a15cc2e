"""A model that has never seen anything learns to read hand-written digits."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForImageTextToText

from finetune_api.v1alpha1.dataset import Dataset
from finetune_api.v1alpha1.model_source import ModelSource
from finetune_trainer.data.load import Method, Tokenizing, load_data
from finetune_trainer.data.row_filter import Rules
from finetune_trainer.data.token_dataset import IGNORED
from finetune_trainer.data.vision_collator import SeeingCollator
from finetune_trainer.methods.sft import predict, render_sample
from finetune_trainer.model.load import describe_model
from testing.fakes.downloads import NONE
from testing.models import digits, tiny_vision
from testing.processes.torchrun import launch

pytestmark = pytest.mark.slow


def test_a_tiny_qwen2_vl_reads_digits_nearly_as_well_as_a_linear_probe(tmp_path: Path) -> None:
    task = digits.build(tmp_path / "digits")
    model = tiny_vision.build(tmp_path / "model")
    spec = {
        "model": {"name": str(model), "freeze": []},
        "dataset": {"train": [{"name": str(task.train)}], "numWorkers": 0},
        "sft": {},
        "training": {
            "globalBatchSize": 50,
            "gradientAccumulationSteps": 1,
            "learningRate": 0.003,
            "warmupSteps": 20,
            "numTrainEpochs": 6,
            "saveSteps": 1000,
        },
        "output": {"persistentVolumeClaim": {"claimName": "unused"}},
    }

    launch(tmp_path / "cells", {"digits": spec}, ranks=2)

    assert accuracy(tmp_path / "cells" / "digits" / "result", task.held_out) > 0.9 * task.linear_probe


@torch.no_grad()
def accuracy(model: Path, rows: Path) -> float:
    """The share of rows whose first token to learn is the likeliest; the result is all that is needed to ask."""
    pretrained = describe_model(ModelSource(name=str(model)), torch.device("cpu"))
    assert pretrained.vision is not None
    how = Tokenizing(
        tokenizer=pretrained.tokenizer,
        model_name=str(model),
        method=Method("sft", lambda renderer, row: render_sample(renderer, row, loss_on="assistant")),
        rules=Rules(),
        seed=0,
        cache=rows.parent / "asked",
        writes=True,
        alive=lambda: None,
        downloads=NONE,
        vision=pretrained.vision,
    )
    samples = load_data(Dataset.model_validate({"train": [{"name": str(rows)}]}), how)
    batch = SeeingCollator(0, pretrained.vision, always=())([samples.samples[i] for i in range(len(samples.train))])
    likeliest = predict(AutoModelForImageTextToText.from_pretrained(model).eval(), batch).argmax(dim=-1)
    learned = batch["labels"][:, 1:] != IGNORED
    first = learned.int().argmax(dim=1, keepdim=True)
    said, wanted = likeliest[:, :-1].gather(1, first), batch["labels"][:, 1:].gather(1, first)
    return float((said == wanted).double().mean())
