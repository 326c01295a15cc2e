"""Tests the choice of the device to which a rank loads weights."""

from typing import Any

import pytest
import torch
from transformers.integrations.deepspeed import HfDeepSpeedConfig

from finetune_trainer.model.weight_loading import WeightLoading, choose_weight_loading
from finetune_trainer.parallel.deepspeed_config import build_deepspeed_config
from testing.builders.jobs import parse_spec

GPU = torch.device("cuda", 1)


@pytest.mark.parametrize(
    ("parallelism", "loading"),
    [
        ({}, WeightLoading(GPU)),
        ({"deepspeed": {"preset": "zero2_offload"}}, WeightLoading(GPU)),
        ({"deepspeed": {"preset": "zero3"}}, WeightLoading(None)),
        ({"deepspeed": {"config": {"zero_optimization": {"stage": 3}}}}, WeightLoading(None)),
        ({"fsdp": {}}, WeightLoading(torch.device("cpu"), rank_zero_only=True)),
    ],
)
def test_weights_are_loaded_to_the_device_unless_they_are_sharded(
    parallelism: dict[str, Any], loading: WeightLoading
) -> None:
    spec = parse_spec(lora=None, **parallelism)
    # transformers keeps only a weak reference to the config that enables ZeRO-3
    config = HfDeepSpeedConfig(build_deepspeed_config(spec.deepspeed)) if spec.deepspeed else None

    assert choose_weight_loading(spec, GPU) == loading
    del config
