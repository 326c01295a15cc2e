"""Test that DPO with precomputed reference log-probabilities trains as with those of every step."""

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from testing.models import tiny_text
from testing.processes.launches import Results, run_cells

pytestmark = pytest.mark.slow

PRESETS: dict[str, dict[str, Any]] = {"ddp": {}, "zero3": {"deepspeed": {"preset": "zero3"}}, "fsdp2": {"fsdp": {}}}
TUNERS: dict[str, dict[str, Any]] = {"lora": {"lora": {"r": 4, "loraDropout": 0.1}}, "full": {}}
ROWS, EVAL_ROWS = 14, 5
STEPS = 4  # two epochs
ROUNDING_ERROR = 1e-4  # micro-batches with other padding differ in the last digits
BFLOAT16_BYTES = 2


@pytest.fixture(scope="module")
def tiny_files(tmp_path_factory: pytest.TempPathFactory) -> tiny_text.TinyFiles:
    return tiny_text.build(tmp_path_factory.mktemp("tiny"), rows=ROWS, eval_rows=EVAL_ROWS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("precomputed") / "cells"


def build_spec(tiny_files: tiny_text.TinyFiles, preset: str, tuner: str, **dpo: Any) -> dict[str, Any]:
    rows = {"train": tiny_files.train, "eval": tiny_files.eval}
    return {
        "model": {"name": str(tiny_files.model)},
        "dataset": {
            **{key: [{"name": str(tiny_text.get_preferences_path(path))}] for key, path in rows.items()},
            "numWorkers": 1 if preset == "ddp" and tuner == "lora" else 0,
        },
        "dpo": {"rpoAlpha": 0.5, **dpo},
        **TUNERS[tuner],
        **PRESETS[preset],
        "training": {
            "perDeviceTrainBatchSize": 2,
            "gradientAccumulationSteps": 2,
            "perDeviceEvalBatchSize": 4,
            "maxSteps": STEPS,
            "saveSteps": 2,
            "evalSteps": 2,
            "learningRate": 0.01 if tuner == "lora" else 0.001,
            "preflight": {"enabled": False},
        },
        "output": {"persistentVolumeClaim": {"claimName": "unused"}},
    }


@pytest.fixture(scope="module")
def results(tiny_files: tiny_text.TinyFiles, folder: Path) -> Results:
    cells = {}
    for preset in PRESETS:
        for tuner in TUNERS:
            cells[f"{preset}, {tuner}"] = build_spec(tiny_files, preset, tuner)
            cells[f"{preset}, {tuner}, precomputed"] = build_spec(tiny_files, preset, tuner, precomputeRefLogProbs=True)
    for tuner in TUNERS:
        name = f"ddp, {tuner}, precomputed"
        cells[f"{name} (from step 2)"] = cells[name]
    # the tracker observes the weights of a reference model only if they are converted, and also copies for checkpoints
    for name in ("ddp, full", "ddp, full, precomputed"):
        cells[f"{name}, bfloat16 (tracked)"] = {
            **cells[name],
            "model": {**cells[name]["model"], "torchDtype": "bfloat16"},
            "training": {**cells[name]["training"], "asyncCheckpoints": False},
        }
    return run_cells(folder, cells, ranks=2)


@pytest.mark.parametrize("tuner", TUNERS)
@pytest.mark.parametrize("preset", PRESETS)
def test_losses_and_rewards_are_equal(results: Results, preset: str, tuner: str) -> None:
    computed, precomputed = (results[f"{preset}, {tuner}{suffix}"] for suffix in ("", ", precomputed"))

    for metric in ("loss", "grad_norm", "rewards/margins", "rewards/accuracies", "eval_loss", "eval_rewards/margins"):
        assert precomputed[metric] == pytest.approx(computed[metric], rel=ROUNDING_ERROR, abs=1e-5), metric
    assert len(precomputed["loss"]) == STEPS
    assert precomputed["loss"][-1] < precomputed["loss"][0] - 0.01


@pytest.mark.parametrize("tuner", TUNERS)
def test_a_resumed_run_uses_the_saved_values_and_is_bit_identical(results: Results, folder: Path, tuner: str) -> None:
    name = f"ddp, {tuner}, precomputed"
    resumed = results[f"{name} (from step 2)"]

    for key in ("loss", "grad_norm", "eval_loss", "weights"):
        assert resumed[key] == results[name][key], key
    saved = load_file(folder / name / "checkpoints/reference-logps/logps.safetensors")
    assert {key: tuple(values.shape) for key, values in saved.items()} == {"train": (ROWS, 2), "eval": (EVAL_ROWS, 2)}
    assert all(bool((values < 0).all()) for values in saved.values())


def test_a_separate_reference_model_is_released(results: Results, folder: Path) -> None:
    """It has linear layers in 16 bits, and embeddings and norms in float32, as the policy computes under autocast."""
    weights = load_file(folder / "ddp, full/result/model.safetensors")
    held, precomputed_held = (
        max(results[f"ddp, full{suffix}, bfloat16 (tracked)"]["held_bytes"]) for suffix in ("", ", precomputed")
    )

    float32_names = [name for name in weights if "embed_tokens" in name or "norm" in name]
    reference_bytes = BFLOAT16_BYTES * sum(weights[name].numel() for name in (*weights, *float32_names))
    assert held - precomputed_held == pytest.approx(reference_bytes, rel=0.05)
