"""Tests that results do not depend on the sharding strategy, and that checkpoints resume with another strategy.

All cells of the selected tests run in one launch. The tests marked `long` cover the strategies that share most of their
code with another one, and further combinations of strategy, tuner and method.
"""

import itertools
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from finetune_trainer.checkpoint.state_files import StateReader
from testing.long_tests import mark_long
from testing.models import tiny_text
from testing.processes.launches import Results, run_cells

pytestmark = pytest.mark.slow

PRESETS: dict[str, dict[str, Any]] = {
    **{
        preset: {"deepspeed": {"preset": preset}}
        for preset in ("zero1", "zero2", "zero2_offload", "zero3", "zero3_offload")
    },
    "fsdp2": {"fsdp": {}},
}
SETTINGS: dict[str, dict[str, Any]] = {
    "fsdp2, gathered until the backward pass, in host memory": {
        "fsdp": {"reshardAfterForward": False, "cpuOffload": True}
    },
    "zero2 by a config": {"deepspeed": {"config": {"zero_optimization": {"stage": 2, "reduce_scatter": False}}}},
}
LONG_PRESETS = ("zero1", "zero2_offload", "zero3_offload", *SETTINGS)
OTHER_PRESET = "shares most of its code with another preset"
OTHER_COMBINATION = "its preset, tuner and method run in other combinations"
METHODS: dict[str, dict[str, Any]] = {"sft": {"sft": {}}, "dpo": {"dpo": {"beta": 0.2, "rpoAlpha": 0.5}}}
TUNERS: dict[str, dict[str, Any]] = {"lora": {"lora": {"r": 16}}, "full": {}}
SLOWLY_SAVED_PRESETS = ("ddp", "zero2", "zero3", "fsdp2")
LONG_SLOWLY_SAVED_PRESETS = ("zero2", "fsdp2")
RESIZED_PRESETS = ("zero3", "fsdp2")
ACCUMULATION_BY_RANKS = {1: 4, 4: 1}  # the effective batch of two ranks with two micro-batches each
EARLY_STOPPING_PRESETS = ("ddp", "zero2", "zero3", "fsdp2")
BEST_STEP, LAST_STEP = 4, 6  # steps of an overfitted run, whose evaluation loss rises after the best step
SHARDED_RUNS = (*itertools.product(PRESETS, TUNERS, METHODS), *((preset, "full", "sft") for preset in SETTINGS))
LONG_SHARDED_RUNS = tuple(run for run in SHARDED_RUNS if run[0] in LONG_PRESETS)
TILED_RUNS = tuple(itertools.product(("ddp", "zero2", "zero3", "fsdp2"), TUNERS, METHODS))
LONG_TILED_RUNS = tuple(run for run in TILED_RUNS if run[1:] in (("lora", "sft"), ("full", "dpo")))
STEPS = 3
FOUR_DIGITS = 1e-4
ROUNDING_ERROR = 1e-5
BFLOAT16_PRESETS = ("ddp", *PRESETS, "fsdp2, gathered until the backward pass, in host memory")
# Relative tolerance of losses in bfloat16. ZeRO-3 gathers 16-bit copies of the trained weights, so that their rounding
# differs from that of DDP, which casts float32 weights.
BFLOAT16_TOLERANCE = {"lora": {"zero3": 2e-4, "zero3_offload": 2e-4}, "full": {}}
DEFAULT_BFLOAT16_TOLERANCE = {"lora": ROUNDING_ERROR, "full": 1e-3}


def format_run_name(preset: str, tuner: str, method: str) -> str:
    return f"{preset}, {tuner}, {method}"


LONG_CELLS = (  # parts of the names of the cells that only long tests need
    *LONG_PRESETS,
    *(f"{format_run_name(*run)} (in tiles)" for run in LONG_TILED_RUNS),
    *(f"{preset}, slow saves" for preset in LONG_SLOWLY_SAVED_PRESETS),
    *(f"{optimizer}, lora" for optimizer in ("adamw_torch_fused", "adamw_8bit")),
)


@pytest.fixture(scope="module")
def tiny_files(tmp_path_factory: pytest.TempPathFactory) -> tiny_text.TinyFiles:
    return tiny_text.build(tmp_path_factory.mktemp("tiny"), rows=60, eval_rows=6)


def build_spec(
    tiny_files: tiny_text.TinyFiles, preset: str, tuner: str, method: str, **training: Any
) -> dict[str, Any]:
    rate = 0.01 if tuner == "lora" else 0.001
    rows_path = {"sft": lambda path: path, "dpo": tiny_text.get_preferences_path}[method]
    return {
        "model": {"name": str(tiny_files.model)},
        "dataset": {
            "train": [{"name": str(rows_path(tiny_files.train))}],
            "eval": [{"name": str(rows_path(tiny_files.eval))}],
            "numWorkers": 0,
        },
        **METHODS[method],
        **TUNERS[tuner],
        **(PRESETS | SETTINGS).get(preset, {}),
        "training": {
            "perDeviceTrainBatchSize": 4,
            "gradientAccumulationSteps": 2,
            "maxSteps": STEPS,
            "saveSteps": 2,
            "learningRate": rate,
            "weightDecay": 0.1,
            "adamBeta2": 0.95,
            "preflight": {"enabled": False},
            **training,
        },
        "output": {"persistentVolumeClaim": {"claimName": "unused"}},
    }


def build_bfloat16_spec(tiny_files: tiny_text.TinyFiles, preset: str, tuner: str) -> dict[str, Any]:
    """Build a spec with four micro-batches per step, whose gradients are accumulated."""
    accumulation = {"perDeviceTrainBatchSize": 2, "gradientAccumulationSteps": 4, "maxSteps": 4}
    job_spec = build_spec(tiny_files, preset, tuner, "sft", **accumulation)
    return {**job_spec, "model": {**job_spec["model"], "torchDtype": "bfloat16"}}


def build_first_rewards_spec(tiny_files: tiny_text.TinyFiles, preset: str, tuner: str) -> dict[str, Any]:
    """Build a spec of DPO in bfloat16 for one step, whose rewards are logged before its update."""
    job_spec = build_spec(tiny_files, preset, tuner, "dpo", maxSteps=1)
    return {**job_spec, "dpo": {}, "model": {**job_spec["model"], "torchDtype": "bfloat16"}}


def build_early_stopping_spec(tiny_files: tiny_text.TinyFiles, preset: str) -> dict[str, Any]:
    """Build a spec whose evaluation loss falls for four steps and rises afterwards."""
    training = {
        "perDeviceTrainBatchSize": 2,
        "gradientAccumulationSteps": 1,
        "learningRate": 0.03,
        "lrSchedulerType": "constant",
        "maxSteps": 16,
        "evalSteps": 1,
        "saveSteps": 5,
        "earlyStoppingPatience": 2,
        "loadBestModelAtEnd": True,
    }
    job_spec = build_spec(tiny_files, preset, "full", "sft", **training)
    return {**job_spec, "dataset": {**job_spec["dataset"], "train": [{"name": f"{tiny_files.train}#4"}]}}


def build_dpo_early_stopping_spec(tiny_files: tiny_text.TinyFiles) -> dict[str, Any]:
    job_spec = build_spec(
        tiny_files, "ddp", "lora", "dpo", **build_early_stopping_spec(tiny_files, "ddp")["training"], saveTotalLimit=1
    )
    job_spec["training"] |= {"saveSteps": 1000, "metricForBestModel": "eval_rewards/accuracies"}
    train = [{"name": f"{tiny_text.get_preferences_path(tiny_files.train)}#4"}]
    return {**job_spec, "dataset": {**job_spec["dataset"], "train": train}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("presets") / "cells"


@pytest.fixture(scope="module")
def results(tiny_files: tiny_text.TinyFiles, folder: Path, includes_long_tests: bool) -> Results:
    cells = build_cells(tiny_files)
    if not includes_long_tests:
        cells = {name: job_spec for name, job_spec in cells.items() if not any(part in name for part in LONG_CELLS)}
    return run_cells(folder, cells, ranks=2)


def build_cells(tiny_files: tiny_text.TinyFiles) -> dict[str, Any]:
    cells = {
        format_run_name(preset, tuner, method): build_spec(tiny_files, preset, tuner, method)
        for preset in ("ddp", *PRESETS)
        for tuner in TUNERS
        for method in METHODS
    }
    cells |= {
        format_run_name(preset, "full", "sft"): build_spec(tiny_files, preset, "full", "sft") for preset in SETTINGS
    }
    for preset in PRESETS:
        for tuner in TUNERS:
            ddp, other = format_run_name("ddp", tuner, "sft"), format_run_name(preset, tuner, "sft")
            cells[f"{preset} <- {ddp}"] = build_spec(tiny_files, preset, tuner, "sft")
            cells[f"ddp <- {other}"] = build_spec(tiny_files, "ddp", tuner, "sft")
        cells[f"{preset} <- {other}"] = build_spec(tiny_files, preset, "full", "sft")
    cells |= {
        f"{preset}, {tuner}, bfloat16": build_bfloat16_spec(tiny_files, preset, tuner)
        for preset in BFLOAT16_PRESETS
        for tuner in TUNERS
    }
    cells |= {
        f"{preset}, {tuner}, first rewards": build_first_rewards_spec(tiny_files, preset, tuner)
        for preset in ("ddp", *PRESETS)
        for tuner in TUNERS
    }
    cells |= {
        f"{preset}, early stopping": build_early_stopping_spec(tiny_files, preset) for preset in EARLY_STOPPING_PRESETS
    }
    cells |= {
        f"{preset}, early stopping (from step 5)": build_early_stopping_spec(tiny_files, preset)
        for preset in ("ddp", "zero3")
    }
    cells |= {f"{format_run_name(*run)} (in tiles)": build_spec(tiny_files, *run) for run in TILED_RUNS}
    for preset in SLOWLY_SAVED_PRESETS:
        job_spec = build_spec(tiny_files, preset, "full", "sft", maxSteps=4)
        cells |= {f"{preset}, slow saves": job_spec, f"{preset}, slow saves (from step 2)": job_spec}
        cells[f"{preset}, slow saves (damaged after step 2)"] = job_spec
    for tuner in TUNERS:
        lora = {"lora": {"r": 64}} if tuner == "lora" else {}  # bitsandbytes keeps moments of small tensors in float32
        job_spec = {**build_spec(tiny_files, "ddp", tuner, "sft", maxSteps=4), **lora}
        cells[f"adamw_torch_fused, {tuner}"] = job_spec
        job_spec = {**job_spec, "training": {**job_spec["training"], "optim": "adamw_8bit"}}
        cells |= {f"adamw_8bit, {tuner}": job_spec, f"adamw_8bit, {tuner} (from step 2)": job_spec}
    cells["ddp, early stopping (again)"] = build_early_stopping_spec(tiny_files, "ddp")
    cells["dpo, early stopping"] = build_dpo_early_stopping_spec(tiny_files)
    return cells


@pytest.mark.parametrize(("preset", "tuner", "method"), mark_long(SHARDED_RUNS, LONG_SHARDED_RUNS, OTHER_PRESET))
def test_every_sharding_strategy_has_the_same_losses_as_ddp(
    results: Results, preset: str, tuner: str, method: str
) -> None:
    ddp, sharded = results[format_run_name("ddp", tuner, method)], results[format_run_name(preset, tuner, method)]

    for metric in ("loss", "grad_norm", "eval_loss"):
        assert sharded[metric] == pytest.approx(ddp[metric], rel=FOUR_DIGITS), metric
    assert len(sharded["loss"]) == STEPS
    assert sharded["loss"][-1] < sharded["loss"][0] - 0.01


@pytest.mark.parametrize(("preset", "tuner", "method"), mark_long(TILED_RUNS, LONG_TILED_RUNS, OTHER_COMBINATION))
def test_losses_in_tiles_are_those_from_all_logits(results: Results, preset: str, tuner: str, method: str) -> None:
    """The weights of the output layer are gathered for all tiles, also in the backward pass."""
    run_name = format_run_name(preset, tuner, method)

    for metric, tolerance in (("loss", ROUNDING_ERROR), ("grad_norm", FOUR_DIGITS), ("eval_loss", ROUNDING_ERROR)):
        expected = pytest.approx(results[run_name][metric], rel=tolerance)
        assert results[f"{run_name} (in tiles)"][metric] == expected, metric
    assert results[f"{run_name} (in tiles)"]["weights"] != results[run_name]["weights"], "sums of other parts"


@pytest.mark.parametrize("tuner", TUNERS)
@pytest.mark.parametrize("preset", mark_long(BFLOAT16_PRESETS[1:], LONG_PRESETS, OTHER_PRESET))
def test_losses_in_bfloat16_are_close_to_those_of_ddp(results: Results, preset: str, tuner: str) -> None:
    """With LoRA they are equal only if gradients are reduced and accumulated in float32, as by DDP."""
    ddp, sharded = (results[f"{each}, {tuner}, bfloat16"] for each in ("ddp", preset))
    tolerance = BFLOAT16_TOLERANCE[tuner].get(preset, DEFAULT_BFLOAT16_TOLERANCE[tuner])

    for metric in ("loss", "eval_loss"):
        assert sharded[metric] == pytest.approx(ddp[metric], rel=tolerance), metric


@pytest.mark.parametrize("tuner", TUNERS)
@pytest.mark.parametrize("preset", mark_long(("ddp", *PRESETS), LONG_PRESETS, OTHER_PRESET))
def test_rewards_are_zero_before_the_first_update(results: Results, preset: str, tuner: str) -> None:
    """The policy and the reference model compute in the same dtypes."""
    first = results[f"{preset}, {tuner}, first rewards"]

    assert [*first["rewards/chosen"], *first["rewards/margins"]] == [0, 0]
    assert first["loss"] == pytest.approx([math.log(2)], abs=1e-6)


@pytest.mark.parametrize("tuner", TUNERS)
@pytest.mark.parametrize("preset", mark_long(PRESETS, LONG_PRESETS, OTHER_PRESET))
def test_checkpoints_can_be_resumed_between_ddp_and_every_preset(results: Results, preset: str, tuner: str) -> None:
    """With LoRA, DeepSpeed has one parameter group, and DDP an empty one for weights without decay, too."""
    uninterrupted = results[format_run_name("ddp", tuner, "sft")]

    for resumed in (
        f"{preset} <- {format_run_name('ddp', tuner, 'sft')}",
        f"ddp <- {format_run_name(preset, tuner, 'sft')}",
    ):
        for metric in ("loss", "eval_loss", "learning_rate"):
            expected = pytest.approx(uninterrupted[metric], rel=ROUNDING_ERROR)
            assert results[resumed][metric] == expected, f"{resumed}: {metric}"


@pytest.mark.parametrize("preset", mark_long(PRESETS, LONG_PRESETS, OTHER_PRESET))
def test_resumed_run_is_bit_identical_to_an_uninterrupted_run(results: Results, preset: str) -> None:
    uninterrupted, resumed = (
        results[format_run_name(preset, "full", "sft")],
        results[f"{preset} <- {format_run_name(preset, 'full', 'sft')}"],
    )

    for key in ("loss", "grad_norm", "eval_loss", "weights"):
        assert resumed[key] == uninterrupted[key], key


@pytest.mark.parametrize("preset", mark_long(SLOWLY_SAVED_PRESETS, LONG_SLOWLY_SAVED_PRESETS, OTHER_COMBINATION))
def test_a_checkpoint_contains_the_state_of_its_step_although_training_continued(results: Results, preset: str) -> None:
    uninterrupted, resumed = (results[f"{preset}, slow saves{suffix}"] for suffix in ("", " (from step 2)"))

    for key in ("loss", "grad_norm", "eval_loss", "weights"):
        assert resumed[key] == uninterrupted[key], key
    assert len(resumed["loss"]) == 4


@pytest.mark.parametrize("preset", mark_long(SLOWLY_SAVED_PRESETS, LONG_SLOWLY_SAVED_PRESETS, OTHER_COMBINATION))
def test_two_ranks_resume_from_the_checkpoint_before_a_damaged_one(results: Results, folder: Path, preset: str) -> None:
    uninterrupted, resumed = (results[f"{preset}, slow saves{suffix}"] for suffix in ("", " (damaged after step 2)"))
    report = (folder / f"{preset}, slow saves" / "result" / "report.html").read_text()

    assert (resumed["loss"], resumed["weights"]) == (uninterrupted["loss"], uninterrupted["weights"])
    assert "state/rank-00001-000.safetensors has other content" in report


@pytest.mark.parametrize("tuner", mark_long(TUNERS, ["lora"], OTHER_COMBINATION))
def test_moments_in_8_bits_have_nearly_the_losses_of_moments_in_float32(results: Results, tuner: str) -> None:
    losses, expected_losses = (
        results[f"{optimizer}, {tuner}"]["loss"] for optimizer in ("adamw_8bit", "adamw_torch_fused")
    )

    assert losses == pytest.approx(expected_losses, rel=0.01)
    assert losses[1:] != expected_losses[1:]


@pytest.mark.parametrize("tuner", mark_long(TUNERS, ["lora"], OTHER_COMBINATION))
def test_moments_in_8_bits_are_resumed_exactly(results: Results, folder: Path, tuner: str) -> None:
    uninterrupted, resumed = (results[f"adamw_8bit, {tuner}{suffix}"] for suffix in ("", " (from step 2)"))
    state = load_file(folder / f"adamw_8bit, {tuner}" / "checkpoints/step-00000004/state/rank-00000-000.safetensors")

    for key in ("loss", "grad_norm", "eval_loss", "weights"):
        assert resumed[key] == uninterrupted[key], key
    assert {moments.dtype for key, moments in state.items() if key.startswith("state1.")} >= {torch.uint8}
    assert {moments.dtype for key, moments in state.items() if key.startswith("absmax1.")} == {torch.float32}


@pytest.fixture(scope="module")
def resized_results(
    results: Results, folder: Path, tiny_files: tiny_text.TinyFiles, tmp_path_factory: pytest.TempPathFactory
) -> dict[int, Results]:
    """Resume the runs of two ranks with one rank and with four; return the results by the number of ranks."""
    resized: dict[int, Results] = {}
    for ranks, accumulation_steps in ACCUMULATION_BY_RANKS.items():
        resumed_folder = tmp_path_factory.mktemp(f"{ranks} ranks")
        cells: dict[str, Any] = {}
        for preset in RESIZED_PRESETS:
            name = format_run_name(preset, "full", "sft")
            shutil.copytree(folder / name, resumed_folder / name)
            cells[f"{preset} <- {name}"] = build_spec(
                tiny_files, preset, "full", "sft", gradientAccumulationSteps=accumulation_steps
            )
        resized[ranks] = run_cells(resumed_folder, cells, ranks=ranks)
    return resized


@pytest.mark.parametrize("ranks", ACCUMULATION_BY_RANKS)
@pytest.mark.parametrize("preset", RESIZED_PRESETS)
def test_checkpoints_can_be_resumed_with_another_number_of_ranks(
    results: Results, resized_results: dict[int, Results], preset: str, ranks: int
) -> None:
    name = format_run_name(preset, "full", "sft")
    uninterrupted, resumed = results[name], resized_results[ranks][f"{preset} <- {name}"]

    assert resumed["loss"] == pytest.approx(uninterrupted["loss"], rel=ROUNDING_ERROR)
    assert resumed["eval_loss"] == pytest.approx(uninterrupted["eval_loss"], rel=ROUNDING_ERROR)


@pytest.mark.parametrize("tuner", TUNERS)
@pytest.mark.parametrize("preset", mark_long(PRESETS, LONG_PRESETS, OTHER_PRESET))
def test_published_weights_are_equal_to_those_of_ddp(results: Results, folder: Path, preset: str, tuner: str) -> None:
    """The names, dtypes and values of all tensors are equal."""
    ddp, sharded = (load_weights(folder / format_run_name(each, tuner, "sft") / "result") for each in ("ddp", preset))

    assert ddp.keys() == sharded.keys()
    for name, tensor in ddp.items():
        assert tensor.dtype == sharded[name].dtype
        assert (tensor - sharded[name]).abs().max() < 1e-4, name


@pytest.mark.parametrize("preset", EARLY_STOPPING_PRESETS)
def test_early_stopping_publishes_the_weights_of_the_best_evaluation(
    results: Results, folder: Path, preset: str
) -> None:
    losses, output = results[f"{preset}, early stopping"]["eval_loss"], folder / f"{preset}, early stopping"
    assert len(losses) == LAST_STEP
    assert min(losses) == losses[BEST_STEP - 1]

    published = load_weights(output / "result")
    saved, last = (StateReader(output / f"checkpoints/step-{step:08d}") for step in (BEST_STEP, LAST_STEP))

    for name, tensor in published.items():
        assert torch.equal(tensor, saved.read_tensor(f"weight.{name}", tensor.shape)), name
    assert any(
        not torch.equal(tensor, last.read_tensor(f"weight.{name}", tensor.shape)) for name, tensor in published.items()
    )


@pytest.mark.parametrize("preset", EARLY_STOPPING_PRESETS[1:])
def test_early_stopping_does_not_depend_on_the_sharding_strategy(results: Results, preset: str) -> None:
    ddp, sharded = results["ddp, early stopping"], results[f"{preset}, early stopping"]

    assert sharded["eval_loss"] == pytest.approx(ddp["eval_loss"], rel=FOUR_DIGITS)


@pytest.mark.parametrize("preset", ["ddp", "zero3"])
def test_early_stopping_state_is_resumed(results: Results, preset: str) -> None:
    """The checkpoint of step 5 stores the first of two evaluations without improvement."""
    assert results[f"{preset}, early stopping (from step 5)"] == results[f"{preset}, early stopping"]


def test_restart_after_early_stopping_only_publishes_the_result(results: Results) -> None:
    assert results["ddp, early stopping (again)"] == results["ddp, early stopping"]


def test_best_checkpoint_is_kept_and_its_step_is_in_the_report(results: Results, folder: Path) -> None:
    output = folder / "dpo, early stopping"
    accuracies = results["dpo, early stopping"]["eval_rewards/accuracies"]
    best = accuracies.index(max(accuracies)) + 1
    assert accuracies[-3:-2] == [max(accuracies)]
    assert best == len(accuracies) - 2

    checkpoints = sorted(path.name for path in (output / "checkpoints").glob("step-*"))
    assert checkpoints == [f"step-{step:08d}" for step in (best, best + 2)]
    adapter = load_weights(output / "result")
    saved = load_file(output / "checkpoints" / checkpoints[0] / "adapter_model.safetensors")
    assert all(torch.equal(tensor, saved[name]) for name, tensor in adapter.items())
    report = (output / "result" / "report.html").read_text()
    assert f"stopped early at step {best + 2} of 16: 2 evaluations without a better eval_rewards/accuracies" in report
    assert f"the weights are those of step {best}, the best of {len(accuracies)} evaluations" in report


def load_weights(folder: Path) -> dict[str, Any]:
    (file,) = folder.glob("*model.safetensors")
    return load_file(file)
