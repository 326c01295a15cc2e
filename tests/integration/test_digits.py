"""Test of training a randomly initialized vision-language model to classify handwritten digits."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForImageTextToText

from finetune_api.v1alpha1.dataset import Dataset
from finetune_api.v1alpha1.model_source import ModelSource
from finetune_trainer.data.collator import MultimodalCollator, SequenceLayout
from finetune_trainer.data.load import TokenizationConfig, load_data
from finetune_trainer.data.row_filter import RowRules
from finetune_trainer.data.row_rendering import build_sft_renderer
from finetune_trainer.data.token_cache import CacheRole
from finetune_trainer.model.load import describe_model
from finetune_trainer.training.token_losses import compute_logits
from testing.fakes.downloads import NO_DOWNLOADS
from testing.models import digits, tiny_vision
from testing.processes.launches import run_cells

pytestmark = pytest.mark.slow


@pytest.mark.long("trains for minutes; test_vision covers the same code in a few steps")
def test_tiny_qwen2_vl_reaches_90_percent_of_linear_probe_accuracy(tmp_path: Path) -> None:
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

    run_cells(tmp_path / "cells", {"digits": spec}, ranks=2)

    assert compute_accuracy(tmp_path / "cells" / "digits" / "result", task.held_out) > 0.9 * task.linear_probe_accuracy


@torch.no_grad()
def compute_accuracy(result_folder: Path, rows: Path) -> float:
    """Return the fraction of rows whose first label token has the highest probability."""
    model_description = describe_model(ModelSource(name=str(result_folder)), torch.device("cpu"))
    assert model_description.vision is not None
    config = TokenizationConfig(
        tokenizer=model_description.tokenizer,
        model_name=str(result_folder),
        row_renderer=build_sft_renderer("assistant"),
        rules=RowRules(),
        seed=0,
        cache=rows.parent / "cache",
        role=CacheRole.WRITER,
        send_heartbeat=lambda: None,
        downloads=NO_DOWNLOADS,
        vision=model_description.vision,
    )
    samples = load_data(Dataset.model_validate({"train": [{"name": str(rows)}]}), config)
    batch = MultimodalCollator(0, SequenceLayout(), model_description.vision, required_modalities=())(
        [samples.samples[i] for i in range(len(samples.train))]
    )
    predictions = compute_logits(AutoModelForImageTextToText.from_pretrained(result_folder).eval(), batch).argmax(
        dim=-1
    )
    targets = batch.targets
    is_first = targets.sequences.diff(prepend=torch.tensor([-1])) != 0  # of each row
    predicted = predictions.flatten()[targets.positions]
    return float((predicted == targets.ids)[is_first].double().mean())
