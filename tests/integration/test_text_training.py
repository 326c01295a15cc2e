"""Tests text training of models with towers, without SDPA and with experts: layouts, sharding, resume and result."""

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForMultimodalLM, PreTrainedModel

from finetune_trainer.model.text_part import find_unreached_modules, is_inside
from testing.models import tiny_families, tiny_text, tiny_towers, tiny_vision
from testing.processes.launches import Results, run_cells

pytestmark = pytest.mark.slow

STEPS = 3
FOUR_DIGITS = 1e-4
ROUTER_LOSS_COEFFICIENT = 0.1
LORA = {"r": 8, "loraDropout": 0.0}
MODEL_TYPES = ("gemma4", "llama4", "qwen2_vl", "qwen3_5")
SHARDING: dict[str, dict[str, Any]] = {
    "zero2": {"deepspeed": {"preset": "zero2"}},
    "zero3": {"deepspeed": {"preset": "zero3"}},
    "fsdp2": {"fsdp": {}},
}
LAYOUTS = {"zero2": (1, 4), "zero3": (2, 2), "fsdp2": (2, 2)}  # the latter exchange weights in each micro-batch
RESUMED_CELLS = ("qwen3_5", "qwen3_5, lora")


def build_spec(model: Path, rows: Path, batch_layout: tuple[int, int], **fields: Any) -> dict[str, Any]:
    micro_batch_size, accumulation = batch_layout
    return {
        "model": {"name": str(model), "textOnly": True},
        "dataset": {"train": [{"name": str(rows)}], "eval": [{"name": f"{rows}#8"}], "numWorkers": 0},
        "sft": {},
        "training": {
            "perDeviceTrainBatchSize": micro_batch_size,
            "gradientAccumulationSteps": accumulation,
            "maxSteps": STEPS,
            "saveSteps": 2,
            "learningRate": 0.003,
            "preflight": {"enabled": False},
        },
        "output": {"persistentVolumeClaim": {"claimName": "unused"}},
        **fields,
    }


def build_text_spec(model: Path, rows: Path, batch_layout: tuple[int, int], **fields: Any) -> dict[str, Any]:
    return {**build_spec(model, rows, batch_layout, **fields), "model": {"name": str(model)}}


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_vision.write_rows(tmp_path_factory.mktemp("rows"), 24)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    built = {name: tiny_towers.build(folder / name, name) for name in tiny_towers.CONFIGS}
    built |= {name: tiny_families.build(folder / name, name) for name in tiny_families.CONFIGS}
    return built | {name: tiny_vision.build(folder / name, name) for name in ("qwen2_vl", "qwen3_5")}


@pytest.fixture(scope="module")
def two_rank_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("two") / "cells"


def build_common_cells(models: dict[str, Path], rows: Path, batch_layout: tuple[int, int]) -> dict[str, Any]:
    pairs = tiny_text.get_preferences_path(rows)
    cells = {name: build_spec(models[name], rows, batch_layout) for name in MODEL_TYPES}
    cells |= {f"{name}, lora": build_spec(models[name], rows, batch_layout, lora=LORA) for name in MODEL_TYPES}
    cells |= {name: build_text_spec(models[name], rows, batch_layout) for name in tiny_families.CONFIGS}
    router_loss = {"training": {**cells["qwen3_moe"]["training"], "routerAuxLossCoef": ROUTER_LOSS_COEFFICIENT}}
    checkpointing = {"training": {**router_loss["training"], "gradientCheckpointing": True}}
    cells["qwen3_moe, router loss"] = {**cells["qwen3_moe"], **router_loss}
    cells["qwen3_moe, router loss, checkpointing"] = {**cells["qwen3_moe"], **checkpointing}
    cells["qwen3_moe, router loss, lora"] = {**cells["qwen3_moe"], **router_loss, "lora": LORA}
    cells["qwen3_moe, router loss, dpo"] = build_text_spec(
        models["qwen3_moe"], pairs, batch_layout, sft=None, dpo={"rpoAlpha": 0.5}, **router_loss
    )
    cells["qwen3_moe, lora"] = build_text_spec(models["qwen3_moe"], rows, batch_layout, lora=LORA)
    return {**cells, "qwen2_vl, dpo": build_spec(models["qwen2_vl"], pairs, batch_layout, sft=None, dpo={})}


@pytest.fixture(scope="module")
def two_rank_results(models: dict[str, Path], rows: Path, two_rank_folder: Path) -> Results:
    cells = build_common_cells(models, rows, (1, 4))
    cells |= {
        f"qwen2_vl, {name}": build_spec(models["qwen2_vl"], rows, LAYOUTS[name], **fields)
        for name, fields in SHARDING.items()
    }
    cells |= {
        f"glm4_moe, {name}": build_text_spec(models["glm4_moe"], rows, (1, 4), **fields)
        for name, fields in SHARDING.items()
    }
    cells |= {f"{name} (from step 2)": cells[name] for name in RESUMED_CELLS}
    return run_cells(two_rank_folder, cells, ranks=2)


@pytest.fixture(scope="module")
def single_rank_results(models: dict[str, Path], rows: Path, tmp_path_factory: pytest.TempPathFactory) -> Results:
    return run_cells(tmp_path_factory.mktemp("one") / "cells", build_common_cells(models, rows, (8, 1)), ranks=1)


@pytest.mark.parametrize("metric", ["loss", "grad_norm", "eval_loss"])
@pytest.mark.parametrize(
    "cell",
    [
        *MODEL_TYPES,
        *(f"{name}, lora" for name in MODEL_TYPES),
        *tiny_families.CONFIGS,
        "qwen3_moe, lora",
        "qwen2_vl, dpo",
    ],
)
def test_training_does_not_depend_on_the_batch_layout(
    two_rank_results: Results, single_rank_results: Results, cell: str, metric: str
) -> None:
    two, one = two_rank_results[cell], single_rank_results[cell]

    assert two[metric] == pytest.approx(one[metric], rel=FOUR_DIGITS)
    assert len(one["loss"]) == STEPS
    assert one["loss"][-1] < one["loss"][0]


@pytest.mark.parametrize("cell", ["qwen3_moe, router loss", "qwen3_moe, router loss, lora"])
def test_the_router_loss_is_weighted_in_training_only(single_rank_results: Results, cell: str) -> None:
    """With one micro-batch per step, the loss of the first step is larger by the weighted auxiliary loss.

    The auxiliary loss is 2, the number of experts per token, if tokens are distributed evenly over the 4 experts.
    """
    plain, weighted = single_rank_results[cell.replace(", router loss", "")], single_rank_results[cell]

    assert 2 < (weighted["loss"][0] - plain["loss"][0]) / ROUTER_LOSS_COEFFICIENT < 4
    assert weighted["eval_loss"] == pytest.approx(plain["eval_loss"], rel=0.01)
    assert weighted["loss"] != plain["loss"]


def test_the_router_loss_depends_little_on_the_batch_layout(
    two_rank_results: Results, single_rank_results: Results
) -> None:
    """Its means are per micro-batch, unlike those of all other losses."""
    cell = "qwen3_moe, router loss"

    assert two_rank_results[cell]["loss"] == pytest.approx(single_rank_results[cell]["loss"], rel=0.01)


def test_the_router_loss_has_the_same_gradients_with_gradient_checkpointing(single_rank_results: Results) -> None:
    kept, recomputed = (single_rank_results[f"qwen3_moe, router loss{suffix}"] for suffix in ("", ", checkpointing"))

    for metric in ("loss", "grad_norm", "eval_loss"):
        assert recomputed[metric] == pytest.approx(kept[metric], rel=FOUR_DIGITS), metric


def test_dpo_trains_with_the_router_loss(two_rank_results: Results) -> None:
    losses = two_rank_results["qwen3_moe, router loss, dpo"]["loss"]

    assert losses[-1] < losses[0]


@pytest.mark.parametrize("model_type", ["qwen2_vl", "glm4_moe"])
@pytest.mark.parametrize("sharding", SHARDING)
def test_sharded_text_training_has_the_losses_of_ddp(two_rank_results: Results, sharding: str, model_type: str) -> None:
    for metric in ("loss", "grad_norm", "eval_loss"):
        ddp, sharded = two_rank_results[model_type][metric], two_rank_results[f"{model_type}, {sharding}"][metric]
        assert sharded == pytest.approx(ddp, rel=FOUR_DIGITS), metric


@pytest.mark.parametrize("cell", RESUMED_CELLS)
def test_resumed_text_training_equals_an_uninterrupted_run(two_rank_results: Results, cell: str) -> None:
    assert two_rank_results[f"{cell} (from step 2)"] == two_rank_results[cell]


@pytest.mark.parametrize("cell", [*MODEL_TYPES, *(f"qwen2_vl, {name}" for name in SHARDING)])
def test_the_result_is_the_full_model_with_unchanged_towers(
    two_rank_results: Results, two_rank_folder: Path, models: dict[str, Path], cell: str
) -> None:
    base, result = (
        load_full_model(folder) for folder in (models[cell.partition(",")[0]], two_rank_folder / cell / "result")
    )
    towers = find_unreached_modules(base.config)
    old, new = base.state_dict(), result.state_dict()

    assert result.config.architectures == base.config.architectures
    assert old.keys() == new.keys()
    changed = {name for name, weight in old.items() if not torch.equal(weight, new[name])}
    assert changed
    assert not any(is_inside(name, towers) for name in changed)
    assert any(is_inside(name, towers) for name in old)


@pytest.mark.parametrize(
    ("cell", "suffix"),
    [
        ("gemma4", ".layer_scalar"),
        ("gemma4", ".input_max"),
        *(
            (f"glm4_moe{sharding}", ".e_score_correction_bias")
            for sharding in ("", *(f", {name}" for name in SHARDING))
        ),
    ],
)
def test_the_result_has_the_buffers_of_the_model(
    two_rank_results: Results, two_rank_folder: Path, models: dict[str, Path], cell: str, suffix: str
) -> None:
    files = (models[cell.partition(",")[0]], two_rank_folder / cell / "result")
    base, result = (load_file(folder / "model.safetensors") for folder in files)

    names = [name for name in base if name.endswith(suffix)]
    assert names
    for name in names:
        assert torch.equal(base[name], result[name]), name


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_adapters_fit_the_full_model(
    two_rank_results: Results, two_rank_folder: Path, models: dict[str, Path], model_type: str
) -> None:
    base = load_full_model(models[model_type])
    towers = find_unreached_modules(base.config)
    result = two_rank_folder / f"{model_type}, lora" / "result"
    names = [name.removeprefix("base_model.model.") for name in load_file(result / "adapter_model.safetensors")]

    adapted = PeftModel.from_pretrained(base, result)

    assert names
    assert not any(is_inside(name, towers) for name in names)
    loaded = [name for name, _ in adapted.named_parameters() if ".lora_" in name]
    assert {name.replace(".default.", ".").removeprefix("base_model.model.") for name in loaded} == set(names)


@pytest.mark.parametrize("cell", ["gemma4", "gemma4, lora", "qwen2_vl"])
def test_the_result_contains_the_processor_files_of_the_model(
    two_rank_results: Results, two_rank_folder: Path, models: dict[str, Path], cell: str
) -> None:
    name = "preprocessor_config.json"

    saved = (two_rank_folder / cell / "result" / name).read_text()

    assert saved == (models[cell.partition(",")[0]] / name).read_text()


def load_full_model(folder: Path) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForMultimodalLM.from_pretrained(folder, attn_implementation="eager")
    return model
