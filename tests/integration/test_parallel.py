"""What is learned does not depend on how memory is spread over the ranks, and a checkpoint fits every way."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from testing.models import tiny_text as tiny
from testing.processes.torchrun import Results, launch

pytestmark = pytest.mark.slow

PRESETS: dict[str, dict[str, Any]] = {
    **{
        preset: {"deepspeed": {"preset": preset}}
        for preset in ("zero1", "zero2", "zero2_offload", "zero3", "zero3_offload")
    },
    "fsdp2": {"fsdp": {}},
}
SETTINGS: dict[str, dict[str, Any]] = {
    "fsdp2, whole until the backward pass, in host memory": {
        "fsdp": {"reshardAfterForward": False, "cpuOffload": True}
    },
    "zero2 by a config": {"deepspeed": {"config": {"zero_optimization": {"stage": 2, "reduce_scatter": False}}}},
}
METHODS: dict[str, dict[str, Any]] = {"sft": {"sft": {}}, "dpo": {"dpo": {"beta": 0.2, "rpoAlpha": 0.5}}}
TUNERS: dict[str, dict[str, Any]] = {"lora": {"lora": {"r": 16}}, "full": {}}
STOPPING = ("ddp", "zero2", "zero3", "fsdp2")
BEST, STOPPED = 4, 6  # steps of a run that learns four rows by heart: then nothing else gets better
STEPS = 3
FOUR_DIGITS = 1e-4
NOTHING_BUT_ROUNDING = 1e-5


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tiny.Tiny:
    return tiny.build(tmp_path_factory.mktemp("tiny"), rows=60, eval_rows=6)


def spec(files: tiny.Tiny, preset: str, tuner: str, method: str, **training: Any) -> dict[str, Any]:
    rate = 0.01 if tuner == "lora" else 0.001
    name = {"sft": lambda path: path, "dpo": tiny.pairs}[method]
    return {
        "model": {"name": str(files.model)},
        "dataset": {
            "train": [{"name": str(name(files.train))}],
            "eval": [{"name": str(name(files.eval))}],
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
            **training,
        },
        "output": {"persistentVolumeClaim": {"claimName": "unused"}},
    }


def stopping(files: tiny.Tiny, preset: str) -> dict[str, Any]:
    """Rates and rows that make the evaluation loss go down for four steps, and up for good."""
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
    made = spec(files, preset, "full", "sft", **training)
    return {**made, "dataset": {**made["dataset"], "train": [{"name": f"{files.train}#4"}]}}


def preferring(files: tiny.Tiny) -> dict[str, Any]:
    made = spec(files, "ddp", "lora", "dpo", **stopping(files, "ddp")["training"], saveTotalLimit=1)
    made["training"] |= {"saveSteps": 1000, "metricForBestModel": "eval_rewards/accuracies"}
    return {**made, "dataset": {**made["dataset"], "train": [{"name": f"{tiny.pairs(files.train)}#4"}]}}


def cell(preset: str, tuner: str, method: str) -> str:
    return f"{preset}, {tuner}, {method}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("presets") / "cells"


@pytest.fixture(scope="module")
def results(files: tiny.Tiny, folder: Path) -> Results:
    cells = {
        cell(preset, tuner, method): spec(files, preset, tuner, method)
        for preset in ("ddp", *PRESETS)
        for tuner in TUNERS
        for method in METHODS
    }
    cells |= {cell(preset, "full", "sft"): spec(files, preset, "full", "sft") for preset in SETTINGS}
    for preset in PRESETS:
        ddp, other = cell("ddp", "full", "sft"), cell(preset, "full", "sft")
        cells[f"{preset} <- {ddp}"] = spec(files, preset, "full", "sft")
        cells[f"{preset} <- {other}"] = spec(files, preset, "full", "sft")
        cells[f"ddp <- {other}"] = spec(files, "ddp", "full", "sft")
    cells |= {f"{preset}, stopping": stopping(files, preset) for preset in STOPPING}
    cells |= {f"{preset}, stopping (from step 5)": stopping(files, preset) for preset in ("ddp", "zero3")}
    cells["ddp, stopping (again)"] = stopping(files, "ddp")
    cells["preferring"] = preferring(files)
    return launch(folder, cells, ranks=2)


@pytest.mark.parametrize(
    ("preset", "tuner", "method"),
    [
        *itertools.product(PRESETS, TUNERS, METHODS),
        *((preset, "full", "sft") for preset in SETTINGS),
    ],
)
def test_every_way_of_spreading_gives_the_losses_of_ddp(results: Results, preset: str, tuner: str, method: str) -> None:
    ddp, spread = results[cell("ddp", tuner, method)], results[cell(preset, tuner, method)]

    for what in ("loss", "grad_norm", "eval_loss"):
        assert spread[what] == pytest.approx(ddp[what], rel=FOUR_DIGITS), what
    assert len(spread["loss"]) == STEPS
    assert spread["loss"][-1] < spread["loss"][0] - 0.01


@pytest.mark.parametrize("preset", PRESETS)
def test_a_checkpoint_of_ddp_is_resumed_under_every_preset_and_back(results: Results, preset: str) -> None:
    whole = results[cell("ddp", "full", "sft")]

    for resumed in (f"{preset} <- {cell('ddp', 'full', 'sft')}", f"ddp <- {cell(preset, 'full', 'sft')}"):
        assert results[resumed]["loss"] == pytest.approx(whole["loss"], rel=NOTHING_BUT_ROUNDING), resumed
        assert results[resumed]["eval_loss"] == pytest.approx(whole["eval_loss"], rel=NOTHING_BUT_ROUNDING), resumed


@pytest.mark.parametrize("preset", PRESETS)
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(results: Results, preset: str) -> None:
    whole, resumed = results[cell(preset, "full", "sft")], results[f"{preset} <- {cell(preset, 'full', 'sft')}"]

    for what in ("loss", "grad_norm", "eval_loss", "weights"):
        assert resumed[what] == whole[what], what


@pytest.mark.parametrize("tuner", TUNERS)
@pytest.mark.parametrize("preset", PRESETS)
def test_the_result_holds_what_was_learned(results: Results, folder: Path, preset: str, tuner: str) -> None:
    """The same tensors as DDP's, under the same names."""
    ddp, spread = (weights(folder / cell(each, tuner, "sft") / "result") for each in ("ddp", preset))

    assert ddp.keys() == spread.keys()
    for name, tensor in ddp.items():
        assert tensor.dtype == spread[name].dtype
        assert (tensor - spread[name]).abs().max() < 1e-4, name


@pytest.mark.parametrize("preset", STOPPING)
def test_a_run_stops_when_nothing_gets_better_and_publishes_the_best(
    results: Results, folder: Path, preset: str
) -> None:
    losses, output = results[f"{preset}, stopping"]["eval_loss"], folder / f"{preset}, stopping"
    assert len(losses) == STOPPED
    assert min(losses) == losses[BEST - 1]

    published = weights(output / "result")
    saved = load_file(output / f"checkpoints/step-{BEST:08d}/training-state.safetensors")
    last = load_file(output / f"checkpoints/step-{STOPPED:08d}/training-state.safetensors")

    assert {f"weight.{name}" for name in published} == {key for key in saved if key.startswith("weight.")}
    for name, tensor in published.items():
        assert torch.equal(tensor, saved[f"weight.{name}"]), name
    assert any(not torch.equal(tensor, last[f"weight.{name}"]) for name, tensor in published.items())


@pytest.mark.parametrize("preset", STOPPING[1:])
def test_every_way_of_spreading_evaluates_and_stops_as_ddp(results: Results, preset: str) -> None:
    ddp, spread = results["ddp, stopping"], results[f"{preset}, stopping"]

    assert spread["eval_loss"] == pytest.approx(ddp["eval_loss"], rel=FOUR_DIGITS)


@pytest.mark.parametrize("preset", ["ddp", "zero3"])
def test_patience_goes_on_where_it_was(results: Results, preset: str) -> None:
    """Step 5 was the first of two without improvement, of which the checkpoint's log knows."""
    assert results[f"{preset}, stopping (from step 5)"] == results[f"{preset}, stopping"]


def test_a_job_that_died_after_it_had_stopped_only_publishes(results: Results) -> None:
    assert results["ddp, stopping (again)"] == results["ddp, stopping"]


def test_the_best_checkpoint_outlives_the_newest_and_the_report_says_whose_weights_it_lies_beside(
    results: Results, folder: Path
) -> None:
    output = folder / "preferring"
    accuracies = results["preferring"]["eval_rewards/accuracies"]
    best = accuracies.index(max(accuracies)) + 1
    assert accuracies[-3:-2] == [max(accuracies)]
    assert best == len(accuracies) - 2

    kept = sorted(path.name for path in (output / "checkpoints").glob("step-*"))
    assert kept == [f"step-{step:08d}" for step in (best, best + 2)]
    adapter = weights(output / "result")
    saved = load_file(output / "checkpoints" / kept[0] / "adapter_model.safetensors")
    assert all(torch.equal(tensor, saved[name]) for name, tensor in adapter.items())
    said = (output / "result" / "report.html").read_text()
    assert f"stopped early at step {best + 2} of 16: 2 evaluations without a better eval_rewards/accuracies" in said
    assert f"the weights are those of step {best}, the best of {len(accuracies)} evaluations" in said


def weights(folder: Path) -> dict[str, Any]:
    (file,) = folder.glob("*model.safetensors")
    return load_file(file)
