"""Tests that compare the memory forecast of sharded training with the memory that DeepSpeed and FSDP2 allocate."""

import json
from typing import Any

import pytest
from transformers import AutoTokenizer

from finetune_api.v1alpha1.job import TrainerSpec
from finetune_trainer.memory.forecast import Forecast, forecast, read_model
from finetune_trainer.training_plan import plan_training
from testing.long_tests import mark_long
from testing.models import tiny_text
from testing.processes.launches import Results, run_cells

pytestmark = pytest.mark.slow

RANKS = 2
# Buckets are small, because the 800 MB buckets of the presets would dominate the memory of a tiny model.
SMALL_BUCKETS = {"reduce_bucket_size": 500_000, "allgather_bucket_size": 500_000}
OPTIMIZER_OFFLOAD = {"offload_optimizer": {"device": "cpu"}}
SHARDING: dict[str, dict[str, Any]] = {
    "zero1": {"deepspeed": {"config": {"zero_optimization": {"stage": 1, **SMALL_BUCKETS}}}},
    "zero2": {"deepspeed": {"config": {"zero_optimization": {"stage": 2, **SMALL_BUCKETS}}}},
    "zero2_offload": {
        "deepspeed": {"config": {"zero_optimization": {"stage": 2, **SMALL_BUCKETS, **OPTIMIZER_OFFLOAD}}}
    },
    "zero3": {"deepspeed": {"preset": "zero3"}},
    "zero3_offload": {"deepspeed": {"preset": "zero3_offload"}},
    "fsdp2": {"fsdp": {}},
    "fsdp2, gathered until the backward pass": {"fsdp": {"reshardAfterForward": False}},
}
TUNERS: dict[str, dict[str, Any]] = {"full": {}, "lora": {"lora": {"r": 8}}}
CELLS = tuple(f"{name} (tracked)" for name in ("zero3, full", "fsdp2, full"))
LONG_CELLS = (
    *(f"{sharding}, full (tracked)" for sharding in SHARDING if f"{sharding}, full (tracked)" not in CELLS),
    *(f"{sharding}, lora (tracked)" for sharding in ("zero2", "zero3", "fsdp2")),
)


@pytest.fixture(scope="module")
def tiny_files(tmp_path_factory: pytest.TempPathFactory) -> tiny_text.TinyFiles:
    """Create identical rows and a model whose weights need more memory than its activations."""
    tiny_files = tiny_text.build(tmp_path_factory.mktemp("sharded"), rows=16, eval_rows=1)
    tiny_text.write_jsonl(tiny_files.train, [repeat_answer(read_first_row(tiny_files))] * 16)
    tiny_text.save_bfloat16_model(tiny_files.model, vocab_size=1024, hidden_size=256, intermediate_size=1024, layers=8)
    return tiny_files


def read_first_row(tiny_files: tiny_text.TinyFiles) -> dict[str, Any]:
    row: dict[str, Any] = json.loads(tiny_files.train.read_text().splitlines()[0])
    return row


def repeat_answer(row: dict[str, Any]) -> dict[str, Any]:
    """Return the row with a longer answer, because the forecast assumes that all tokens are targets."""
    prompt, answer = row["messages"]
    return {**row, "messages": [prompt, {**answer, "content": 4 * answer["content"]}]}


def build_spec(tiny_files: tiny_text.TinyFiles, run_name: str) -> dict[str, Any]:
    sharding, _, tuner = run_name.removesuffix(" (tracked)").rpartition(", ")
    return {
        "model": {"name": str(tiny_files.model)},
        "dataset": {"train": [{"name": str(tiny_files.train)}], "numWorkers": 0},
        "sft": {},
        **TUNERS[tuner],
        **SHARDING[sharding],
        "training": {"perDeviceTrainBatchSize": 1, "gradientAccumulationSteps": 2, "maxSteps": 2, "saveSteps": 100},
        "nprocPerNode": RANKS,
        "output": {"persistentVolumeClaim": {"claimName": "unused"}},
    }


@pytest.fixture(scope="module")
def run_names(includes_long_tests: bool) -> tuple[str, ...]:
    return (*CELLS, *LONG_CELLS) if includes_long_tests else CELLS


@pytest.fixture(scope="module")
def measured_results(
    tiny_files: tiny_text.TinyFiles, run_names: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory
) -> Results:
    folder = tmp_path_factory.mktemp("measured") / "cells"
    return run_cells(folder, {run_name: build_spec(tiny_files, run_name) for run_name in run_names}, ranks=RANKS)


@pytest.fixture(scope="module")
def forecasts(tiny_files: tiny_text.TinyFiles, run_names: tuple[str, ...]) -> dict[str, Forecast]:
    specs = {run_name: TrainerSpec.model_validate(build_spec(tiny_files, run_name)) for run_name in run_names}
    tokenizer = AutoTokenizer.from_pretrained(tiny_files.model)
    length = len(tokenizer.apply_chat_template(read_first_row(tiny_files)["messages"], return_dict=True)["input_ids"])
    plans = {run_name: plan_training(spec, world_size=spec.world_size) for run_name, spec in specs.items()}
    return {
        run_name: forecast(plan, read_model(plan.spec), on_gpu=False, max_sample_length=length)
        for run_name, plan in plans.items()
    }


@pytest.mark.parametrize(
    "run_name", mark_long((*CELLS, *LONG_CELLS), LONG_CELLS, "shares most of its code with another cell")
)
def test_forecast_is_close_to_the_measured_peak(
    run_name: str, measured_results: Results, forecasts: dict[str, Forecast]
) -> None:
    peak_bytes = max(measured_results[run_name]["peak_bytes"])

    assert 0.97 * peak_bytes <= forecasts[run_name].rank.total <= 1.15 * peak_bytes


@pytest.mark.parametrize(
    "run_name", mark_long((*CELLS, *LONG_CELLS), LONG_CELLS, "shares most of its code with another cell")
)
def test_forecast_is_close_to_the_memory_held_between_steps(
    run_name: str, measured_results: Results, forecasts: dict[str, Forecast]
) -> None:
    """FSDP2 frees gradients after the update; ZeRO-3 does not shard small weights such as those of adapters."""
    transient_parts = {"gathered weights", "gradients in transit", "gradient buckets", "gradients for the update"}
    transient_parts |= {"activations", "logits and loss"} | ({"gradients"} if run_name.startswith("fsdp2") else set())
    held_bytes = sum(part.size for part in forecasts[run_name].rank.parts if part.name not in transient_parts)

    assert held_bytes == pytest.approx(measured_results[run_name]["held_bytes"][-1], rel=0.06)
