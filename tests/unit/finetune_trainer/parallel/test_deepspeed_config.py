"""Test the DeepSpeed presets and the validation of raw DeepSpeed configs."""

from typing import Any

import pytest

from finetune_api.v1alpha1.parallelism import Deepspeed
from finetune_trainer.errors import InvalidSpec
from finetune_trainer.parallel.deepspeed_config import build_deepspeed_config, get_zero_stage

PRESETS = ("zero1", "zero2", "zero2_offload", "zero3", "zero3_offload")


@pytest.mark.parametrize("preset", PRESETS)
def test_preset_name_matches_its_stage_and_offloading(preset: Any) -> None:
    config = build_deepspeed_config(Deepspeed(preset=preset))
    zero = config["zero_optimization"]

    assert get_zero_stage(config) == int(preset[4])
    offloaded_parts = {part for part in ("optimizer", "param") if f"offload_{part}" in zero}
    assert offloaded_parts == {"zero2_offload": {"optimizer"}, "zero3_offload": {"optimizer", "param"}}.get(
        preset, set()
    )


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(build_deepspeed_config(Deepspeed(preset="zero2")), id="preset"),
        pytest.param(
            build_deepspeed_config(Deepspeed(config={"zero_optimization": {"stage": 2}, "bf16": {"enabled": "auto"}})),
            id="raw config",
        ),
    ],
)
def test_batch_size_clipping_and_precision_are_auto(config: dict[str, Any]) -> None:
    assert config["train_micro_batch_size_per_gpu"] == config["gradient_accumulation_steps"] == "auto"
    assert config["gradient_clipping"] == "auto"
    assert (config["bf16"]["enabled"], config["fp16"]) == ("auto", {"enabled": "auto"})


@pytest.mark.parametrize(
    ("field", "value", "spec_field"),
    [
        ("train_micro_batch_size_per_gpu", 4, "spec.training.perDeviceTrainBatchSize"),
        ("optimizer", {"type": "AdamW"}, "spec.training.learningRate and weightDecay"),
        ("bf16", {"enabled": True}, "spec.model.torchDtype"),
        ("gradient_clipping", 0.5, "spec.training.maxGradNorm"),
    ],
)
def test_error_for_a_conflicting_option_names_the_spec_field(field: str, value: Any, spec_field: str) -> None:
    with pytest.raises(InvalidSpec) as raised:
        build_deepspeed_config(Deepspeed(config={"zero_optimization": {"stage": 2}, field: value}))

    assert str(raised.value).startswith(f"spec.deepspeed.config.{field}: ")
    assert spec_field in str(raised.value)


@pytest.mark.parametrize(
    "config",
    [{}, {"zero_optimization": {"stage": 0}}, {"zero_optimization": 2}],
    ids=["no section", "stage 0", "not an object"],
)
def test_config_without_a_sharding_stage_is_rejected(config: dict[str, Any]) -> None:
    with pytest.raises(InvalidSpec, match=r"zero_optimization\.stage: expected 1, 2 or 3"):
        build_deepspeed_config(Deepspeed(config=config))
