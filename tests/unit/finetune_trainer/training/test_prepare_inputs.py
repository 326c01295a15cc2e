"""Tests which inputs of a micro-batch get the dtype of a model that DeepSpeed trains."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from finetune_trainer.data.collator import Collator, SequenceLayout
from finetune_trainer.data.token_dataset import REFERENCE_LOGPS
from finetune_trainer.methods.sft import SftTrainer


@pytest.mark.parametrize("uses_deepspeed", [False, True])
def test_only_pixels_get_the_dtype_of_the_model(uses_deepspeed: bool) -> None:
    ids, features = torch.tensor([1, 2]), {"weights": torch.tensor([0.0, 0.3]), REFERENCE_LOGPS: torch.tensor([-123.4])}
    batch = Collator(0, SequenceLayout(padding_free=True))([({"input_ids": ids, "labels": ids, **features},)])
    batch.inputs["pixel_values"] = torch.ones(2)
    trainer: Any = SftTrainer.__new__(SftTrainer)
    trainer.is_deepspeed_enabled = uses_deepspeed
    plugin = SimpleNamespace(hf_ds_config=SimpleNamespace(dtype=lambda: torch.bfloat16))
    trainer.accelerator = SimpleNamespace(state=SimpleNamespace(deepspeed_plugin=plugin))
    trainer.args = SimpleNamespace(device=torch.device("cpu"))

    prepared = trainer._prepare_inputs(batch)

    assert prepared.inputs["pixel_values"].dtype is (torch.bfloat16 if uses_deepspeed else torch.float32)
    assert prepared.targets.weights.dtype is prepared.reference_logps.dtype is torch.float32
    assert prepared.reference_logps.tolist() == pytest.approx([-123.4])
