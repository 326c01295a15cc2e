"""What is learned does not depend on how memory is spread over the ranks, and a checkpoint fits every way."""

import itertools
from pathlib import Path
from typing import Any

import pytest

from support import tiny
from support.launch import Results, launch

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


def cell(preset: str, tuner: str, method: str) -> str:
    return f"{preset}, {tuner}, {method}"


@pytest.fixture(scope="module")
def results(files: tiny.Tiny, tmp_path_factory: pytest.TempPathFactory) -> Results:
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
    return launch(tmp_path_factory.mktemp("presets") / "cells", cells, ranks=2)


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
def test_the_result_holds_what_was_learned(
    results: Results, tmp_path_factory: pytest.TempPathFactory, preset: str, tuner: str
) -> None:
    """The same tensors as DDP's, under the same names."""
    folder = next(Path(tmp_path_factory.getbasetemp()).glob("presets*/cells"))

    ddp, spread = (weights(folder / cell(each, tuner, "sft") / "result") for each in ("ddp", preset))

    assert ddp.keys() == spread.keys()
    for name, tensor in ddp.items():
        assert tensor.dtype == spread[name].dtype
        assert (tensor - spread[name]).abs().max() < 1e-4, name


def weights(folder: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    (file,) = folder.glob("*model.safetensors")
    return load_file(file)
