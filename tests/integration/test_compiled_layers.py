"""Tests that trainings with compiled layers have the losses of trainings without, also if they are resumed.

torch.compile only traces, because generating code takes a minute on a CPU; one long test generates code.
"""

from typing import Any

import pytest

from testing.models import tiny_text
from testing.processes.launches import Results, run_cells

pytestmark = pytest.mark.slow

ROUNDING_ERROR = 1e-5
RUNS: dict[str, dict[str, Any]] = {
    "full, sft": {"sft": {}},
    "fsdp2, dpo": {"dpo": {}, "fsdp": {}},
    "recomputed, lora, dpo": {"dpo": {}, "lora": {"r": 8}, "training": {"gradientCheckpointing": True}},
}
COMPILED = {name: f"{name}, compiled (traced)" for name in RUNS}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory, includes_long_tests: bool) -> Results:
    folder = tmp_path_factory.mktemp("compiled")
    tiny_files = tiny_text.build(folder / "tiny", rows=60, eval_rows=6)
    cells = {name: build_spec(tiny_files, fields, is_compiled=False) for name, fields in RUNS.items()}
    cells |= {COMPILED[name]: build_spec(tiny_files, fields, is_compiled=True) for name, fields in RUNS.items()}
    cells["full, sft, compiled (traced) (from step 2)"] = cells["full, sft, compiled (traced)"]
    if includes_long_tests:
        cells["full, sft, compiled"] = cells["full, sft, compiled (traced)"]
    single_rank_cells = {name: cells.pop(name) for name in tuple(cells) if not name.startswith("fsdp2")}
    return {
        **run_cells(folder / "one rank", single_rank_cells, ranks=1),
        **run_cells(folder / "two ranks", cells, ranks=2),
    }


def build_spec(tiny_files: tiny_text.TinyFiles, fields: dict[str, Any], *, is_compiled: bool) -> dict[str, Any]:
    rows = tiny_text.get_preferences_path(tiny_files.train) if "dpo" in fields else tiny_files.train
    return {
        "model": {"name": str(tiny_files.model)},
        "dataset": {"train": [{"name": str(rows)}], "numWorkers": 0},
        "output": {"persistentVolumeClaim": {"claimName": "unused"}},
        **fields,
        "training": {
            "perDeviceTrainBatchSize": 4,
            "maxSteps": 4,
            "saveSteps": 2,
            "learningRate": 0.001,
            "torchCompile": is_compiled,
            **fields.get("training", {}),
        },
    }


@pytest.mark.parametrize("name", RUNS)
def test_compiled_layers_have_the_losses_of_layers_that_are_not_compiled(results: Results, name: str) -> None:
    compiled, expected = results[COMPILED[name]], results[name]

    assert compiled["loss"] == pytest.approx(expected["loss"], rel=ROUNDING_ERROR)
    assert compiled["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-4)
    assert expected["compiled_graphs"] == 0
    assert compiled["compiled_graphs"] > 0


@pytest.mark.long("generates code for a minute, from the graphs of the traced cell")
def test_generated_code_has_the_losses_of_layers_that_are_not_compiled(results: Results) -> None:
    compiled, expected = results["full, sft, compiled"], results["full, sft"]

    assert compiled["loss"] == pytest.approx(expected["loss"], rel=ROUNDING_ERROR)
    assert compiled["compiled_graphs"] == 2 * 4


def test_the_number_of_graphs_does_not_grow_with_the_number_of_row_lengths(results: Results) -> None:
    """The parts are the norm, the projections before and after attention, and the MLP, with and without gradients."""
    assert results["full, sft, compiled (traced)"]["compiled_graphs"] == 2 * 4


def test_a_training_with_compiled_layers_is_resumed_exactly(results: Results) -> None:
    uninterrupted, resumed = (results[f"full, sft, compiled (traced){suffix}"] for suffix in ("", " (from step 2)"))

    assert resumed["loss"] == uninterrupted["loss"]
    assert resumed["weights"] == uninterrupted["weights"]
