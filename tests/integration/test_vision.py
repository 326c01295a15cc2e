"""Tests that results of vision-language models depend neither on the batch layout nor on the sharding strategy."""

import json
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText

from finetune_trainer.vision.families import FAMILIES
from finetune_trainer.vision.freeze import find_group
from testing.long_tests import mark_long
from testing.models import tiny_text, tiny_vision
from testing.processes.launches import Results, run_cells

pytestmark = pytest.mark.slow

STEPS = 3
FOUR_DIGITS = 1e-4
WITH_EXPERTS = ("qwen3_vl_moe", "qwen3_5_moe")
# A rounding error may route a token to another expert in the steps after the first update.
TOLERANCES_AFTER_AN_UPDATE = {"loss": 1e-3, "grad_norm": 5e-3, "eval_loss": 1e-3}
PRESETS: dict[str, dict[str, Any]] = {
    **{
        preset: {"deepspeed": {"preset": preset}}
        for preset in ("zero1", "zero2", "zero2_offload", "zero3", "zero3_offload")
    },
    "fsdp2": {"fsdp": {}},
}
WEIGHT_SHARDING_PRESETS = ("zero3", "fsdp2")  # every rank gathers the weights of each layer from other ranks
LONG_PRESETS = ("zero1", "zero2_offload", "zero3_offload")
OTHER_PRESET = "shares most of its code with another preset"
TWO_RANKS, ONE_RANK = (1, 2), (4, 1)  # layouts with an effective batch of 4; the few rows with videos need one of 8
LEARNING_RATES = {"learningRate": 0.003, "visionLearningRate": 0.0003, "alignerLearningRate": 0.01}
# transformers names layers of these types that only other parts have, which FSDP2 must not look for
TYPES_WITH_ABSENT_LAYERS = ("llava", "gemma3")
RESUMED_CELLS = ("qwen2_vl", "zero1", "zero2", "zero3", "fsdp2")
PACKING_MODEL_TYPES = [model_type for model_type in tiny_vision.RECIPES if FAMILIES[model_type].supports_packing]
DPO = {"beta": 0.2, "rpoAlpha": 0.5}


def count_images(row_number: int) -> int:
    """Return the number of images in a row; two of three rows have none, so that many micro-batches lack images."""
    return 0 if row_number % 3 else 1 + row_number % 2


def build_spec(
    model: Path, rows: Path, batch_layout: tuple[int, int], model_fields: dict[str, Any] | None = None, **fields: Any
) -> dict[str, Any]:
    """Build a spec that trains every component with a separate learning rate.

    `batch_layout`: micro-batch size and accumulation steps. `model_fields`: changes to spec.model. With
    `model_fields` or with LoRA, all components have the same learning rate.
    """
    micro_batch_size, accumulation = batch_layout
    training = {
        "perDeviceTrainBatchSize": micro_batch_size,
        "gradientAccumulationSteps": accumulation,
        "maxSteps": STEPS,
        "saveSteps": 2,
        "weightDecay": 0.1,
        "preflight": {"enabled": False},
        **(LEARNING_RATES if model_fields is None and "lora" not in fields else {"learningRate": 0.003}),
    }
    return {
        "model": {"name": str(model), "freeze": [], **(model_fields or {})},
        "dataset": {"train": [{"name": str(rows)}], "eval": [{"name": f"{rows}#8"}], "numWorkers": 0},
        "sft": {},
        "training": training,
        "output": {"persistentVolumeClaim": {"claimName": "unused"}},
        **fields,
    }


def assert_same_metric(two: Any, one: Any, metric: str, model_type: str) -> None:
    """Compare a metric of all steps; eval_loss is measured after the last step."""
    if model_type not in WITH_EXPERTS:
        assert two[metric] == pytest.approx(one[metric], rel=FOUR_DIGITS)
        return
    assert two[metric] == pytest.approx(one[metric], rel=TOLERANCES_AFTER_AN_UPDATE[metric])
    if metric != "eval_loss":
        assert two[metric][0] == pytest.approx(one[metric][0], rel=FOUR_DIGITS)


def build_packed_spec(model: Path, rows: Path, batch_layout: tuple[int, int], **fields: Any) -> dict[str, Any]:
    job_spec = build_spec(model, rows, batch_layout, **fields)
    return {**job_spec, "dataset": {**job_spec["dataset"], "packing": True, "maxLength": 256}}


def build_skipping_spec(model: Path, rows: Path, batch_layout: tuple[int, int]) -> dict[str, Any]:
    job_spec = build_spec(model, rows, batch_layout)
    return {**job_spec, "dataset": {**job_spec["dataset"], "onBadRow": "skip"}}


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_vision.write_rows(tmp_path_factory.mktemp("rows"), 24, images=count_images)


@pytest.fixture(scope="module")
def video_rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write rows with an image, with a video, with both and with neither."""
    folder = tmp_path_factory.mktemp("videos")
    return tiny_vision.write_rows(folder, 24, images=lambda number: number % 4 // 2, videos=lambda number: number % 2)


@pytest.fixture(scope="module")
def rows_with_truncated_images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write rows with some images that cannot be decoded; tokenization reads only the headers of a JPEG file."""
    folder = tmp_path_factory.mktemp("truncated")
    rows = tiny_vision.write_rows(folder, 24, images=count_images)
    for image in [folder / f"{number}-0.png" for number in range(0, 24, 6)]:
        jpeg = BytesIO()
        Image.open(image).convert("RGB").save(jpeg, "JPEG")
        image.write_bytes(jpeg.getvalue()[: -len(jpeg.getvalue()) // 4])
    return rows


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {model_type: tiny_vision.build(folder / model_type, model_type) for model_type in tiny_vision.RECIPES}


@pytest.fixture(scope="module")
def two_rank_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("two") / "cells"


@pytest.fixture(scope="module")
def two_rank_results(
    models: dict[str, Path],
    rows: Path,
    video_rows: Path,
    rows_with_truncated_images: Path,
    two_rank_folder: Path,
    includes_long_tests: bool,
) -> Results:
    cells = {model_type: build_spec(model, rows, TWO_RANKS) for model_type, model in models.items()}
    cells |= {
        f"{model_type}, lora": build_spec(model, rows, TWO_RANKS, lora={"r": 16})
        for model_type, model in models.items()
    }
    cells |= {
        f"{preset}{tuner}": build_spec(
            models["qwen2_vl"], rows, TWO_RANKS, **sharding, **({"lora": {"r": 16}} if tuner else {})
        )
        for preset, sharding in PRESETS.items()
        for tuner in ("", ", lora")
        if includes_long_tests or preset not in LONG_PRESETS
    }
    cells |= {
        f"fsdp2, {model_type}": build_spec(models[model_type], rows, TWO_RANKS, **PRESETS["fsdp2"])
        for model_type in TYPES_WITH_ABSENT_LAYERS
    }
    cells |= {f"{name} (from step 2)": cells[name] for name in RESUMED_CELLS if name in cells}
    cells["zero2 <- qwen2_vl"], cells["qwen2_vl <- zero2"] = cells["zero2"], cells["qwen2_vl"]
    cells["dpo"] = build_spec(models["qwen2_vl"], tiny_text.get_preferences_path(rows), TWO_RANKS, sft=None, dpo=DPO)
    cells["default freeze"] = build_spec(models["qwen2_vl"], rows, TWO_RANKS, {"freeze": None})
    cells["loader processes"] = build_spec(models["qwen2_vl"], rows, TWO_RANKS)
    cells["loader processes"]["dataset"]["numWorkers"] = 1
    cells["smaller images"] = build_spec(models["qwen2_vl"], rows, TWO_RANKS, {"maxPixels": 28 * 28 * 2})
    cells |= {
        f"{model_type}, videos": build_spec(models[model_type], video_rows, (1, 4))
        for model_type in tiny_vision.VIDEO_MODEL_TYPES
    }
    cells |= {
        f"{preset}, videos": build_spec(models["qwen2_vl"], video_rows, (2, 2), **PRESETS[preset])
        for preset in WEIGHT_SHARDING_PRESETS
    }
    cells |= {
        f"{model_type}, packed": build_packed_spec(models[model_type], rows, (1, 2))
        for model_type in PACKING_MODEL_TYPES
    }
    cells |= {
        f"{preset}, packed": build_packed_spec(models["qwen2_vl"], rows, (1, 2), **PRESETS[preset])
        for preset in WEIGHT_SHARDING_PRESETS
    }
    cells["qwen2_vl, packed (from step 2)"] = cells["qwen2_vl, packed"]
    truncated = build_skipping_spec(models["qwen2_vl"], rows_with_truncated_images, TWO_RANKS)
    cells |= {"truncated": truncated, "truncated (from step 2)": truncated}
    cells["truncated, loader processes"] = {**truncated, "dataset": {**truncated["dataset"], "numWorkers": 1}}
    return run_cells(two_rank_folder, cells, ranks=2)


@pytest.fixture(scope="module")
def single_rank_results(
    models: dict[str, Path],
    rows: Path,
    video_rows: Path,
    rows_with_truncated_images: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Results:
    cells = {model_type: build_spec(model, rows, ONE_RANK) for model_type, model in models.items()}
    cells |= {
        f"{model_type}, lora": build_spec(model, rows, ONE_RANK, lora={"r": 16}) for model_type, model in models.items()
    }
    cells["dpo"] = build_spec(models["qwen2_vl"], tiny_text.get_preferences_path(rows), ONE_RANK, sft=None, dpo=DPO)
    cells |= {
        f"{model_type}, videos": build_spec(models[model_type], video_rows, (8, 1))
        for model_type in tiny_vision.VIDEO_MODEL_TYPES
    }
    cells |= {
        f"{model_type}, packed": build_packed_spec(models[model_type], rows, (4, 1))
        for model_type in PACKING_MODEL_TYPES
    }
    cells["truncated"] = build_skipping_spec(models["qwen2_vl"], rows_with_truncated_images, ONE_RANK)
    return run_cells(tmp_path_factory.mktemp("one") / "cells", cells, ranks=1)


@pytest.mark.parametrize("metric", ["loss", "grad_norm", "eval_loss"])
@pytest.mark.parametrize("tuner", ["", ", lora"])
@pytest.mark.parametrize("model_type", tiny_vision.RECIPES)
def test_ranks_without_images_do_not_change_gradients(
    two_rank_results: Results, single_rank_results: Results, model_type: str, tuner: str, metric: str
) -> None:
    two, one = two_rank_results[model_type + tuner], single_rank_results[model_type + tuner]

    assert_same_metric(two, one, metric, model_type)
    assert len(one["loss"]) == STEPS
    # each step trains on other rows
    assert min(one["loss"][-1], one["eval_loss"][-1]) < one["loss"][0]


@pytest.mark.parametrize("metric", ["loss", "grad_norm", "eval_loss"])
@pytest.mark.parametrize("model_type", tiny_vision.VIDEO_MODEL_TYPES)
def test_video_training_does_not_depend_on_the_batch_layout(
    two_rank_results: Results, single_rank_results: Results, model_type: str, metric: str
) -> None:
    two, one = two_rank_results[f"{model_type}, videos"], single_rank_results[f"{model_type}, videos"]

    assert_same_metric(two, one, metric, model_type)
    assert one["loss"][-1] < one["loss"][0]


@pytest.mark.parametrize("metric", ["loss", "grad_norm", "eval_loss"])
@pytest.mark.parametrize("model_type", PACKING_MODEL_TYPES)
def test_packed_image_training_does_not_depend_on_the_batch_layout(
    two_rank_results: Results, single_rank_results: Results, model_type: str, metric: str
) -> None:
    two, one = two_rank_results[f"{model_type}, packed"], single_rank_results[f"{model_type}, packed"]

    assert_same_metric(two, one, metric, model_type)
    assert one["loss"] != single_rank_results[model_type]["loss"]


def test_packed_image_training_can_be_resumed_and_sharded(two_rank_results: Results) -> None:
    reference = two_rank_results["qwen2_vl, packed"]

    assert two_rank_results["qwen2_vl, packed (from step 2)"] == reference
    for preset in WEIGHT_SHARDING_PRESETS:
        assert two_rank_results[f"{preset}, packed"]["loss"] == pytest.approx(reference["loss"], rel=FOUR_DIGITS)


@pytest.mark.parametrize("metric", ["loss", "grad_norm", "eval_loss"])
def test_rows_that_are_skipped_during_training_count_on_no_rank(
    two_rank_results: Results, single_rank_results: Results, metric: str
) -> None:
    reference = two_rank_results["truncated"]

    assert reference[metric] == pytest.approx(single_rank_results["truncated"][metric], rel=FOUR_DIGITS)
    assert reference["loss"] != two_rank_results["qwen2_vl"]["loss"]
    for name in ("truncated (from step 2)", "truncated, loader processes"):
        assert two_rank_results[name] == reference


def test_checkpoints_list_the_rows_that_are_skipped(two_rank_results: Results, two_rank_folder: Path) -> None:
    assert two_rank_results["truncated"]["loss"]
    (checkpoint,) = sorted((two_rank_folder / "truncated/checkpoints").glob("step-*"))[-1:]
    skipped = torch.load(checkpoint / "skipped-rows.pt", weights_only=True)

    assert {name for name, _ in skipped} == {"train", "eval"}
    lines = [message.split("rows.jsonl ")[1].split(":")[0] for message in skipped.values()]
    assert set(lines) == {"line 1", "line 7", "line 19"}  # the three steps do not read line 13


@pytest.mark.parametrize("preset", WEIGHT_SHARDING_PRESETS)
def test_video_training_does_not_depend_on_the_sharding_strategy(two_rank_results: Results, preset: str) -> None:
    """Ranks would deadlock if they called the vision encoder a different number of times."""
    for metric in ("loss", "grad_norm", "eval_loss"):
        ddp, sharded = two_rank_results["qwen2_vl, videos"][metric], two_rank_results[f"{preset}, videos"][metric]
        assert sharded == pytest.approx(ddp, rel=FOUR_DIGITS), metric


@pytest.mark.parametrize("tuner", ["", ", lora"])
@pytest.mark.parametrize("preset", mark_long(PRESETS, LONG_PRESETS, OTHER_PRESET))
def test_every_sharding_strategy_has_the_same_losses_as_ddp(two_rank_results: Results, preset: str, tuner: str) -> None:
    ddp, sharded = two_rank_results[f"qwen2_vl{tuner}"], two_rank_results[f"{preset}{tuner}"]

    for metric in ("loss", "grad_norm", "eval_loss"):
        assert sharded[metric] == pytest.approx(ddp[metric], rel=FOUR_DIGITS), metric


@pytest.mark.parametrize("model_type", TYPES_WITH_ABSENT_LAYERS)
def test_fsdp2_has_the_same_losses_as_ddp_for_types_that_name_absent_layers(
    two_rank_results: Results, model_type: str
) -> None:
    for metric in ("loss", "grad_norm", "eval_loss"):
        expected = pytest.approx(two_rank_results[model_type][metric], rel=FOUR_DIGITS)
        assert two_rank_results[f"fsdp2, {model_type}"][metric] == expected, metric


@pytest.mark.parametrize("run_name", mark_long(RESUMED_CELLS, LONG_PRESETS, OTHER_PRESET))
def test_resumed_run_with_several_learning_rates_equals_an_uninterrupted_run(
    two_rank_results: Results, run_name: str
) -> None:
    assert two_rank_results[f"{run_name} (from step 2)"] == two_rank_results[run_name]


@pytest.mark.parametrize("run_name", ["zero2 <- qwen2_vl", "qwen2_vl <- zero2"])
def test_checkpoint_with_several_learning_rates_resumes_with_another_strategy(
    two_rank_results: Results, run_name: str
) -> None:
    assert two_rank_results[run_name]["loss"] == pytest.approx(two_rank_results["qwen2_vl"]["loss"], rel=1e-5)
    assert two_rank_results[run_name]["eval_loss"] == pytest.approx(two_rank_results["qwen2_vl"]["eval_loss"], rel=1e-5)


@pytest.mark.parametrize("run_name", mark_long(["qwen2_vl", *PRESETS], LONG_PRESETS, OTHER_PRESET))
def test_every_component_is_trained_with_its_own_learning_rate(
    two_rank_results: Results, two_rank_folder: Path, models: dict[str, Path], run_name: str
) -> None:
    """AdamW changes a weight by the learning rate in the first step, and by at most about as much in later steps."""
    changes = find_largest_changes(models["qwen2_vl"], two_rank_folder / run_name / "result", "qwen2_vl")

    for component, rate in (("language", 0.003), ("vision", 0.0003), ("aligner", 0.01)):
        assert rate * 0.9 < changes[component] < rate * STEPS, component


@pytest.mark.parametrize("metric", ["loss", "grad_norm", "rewards/margins", "eval_loss"])
def test_dpo_with_images_does_not_depend_on_the_batch_layout(
    two_rank_results: Results, single_rank_results: Results, metric: str
) -> None:
    assert two_rank_results["dpo"][metric] == pytest.approx(
        single_rank_results["dpo"][metric], rel=FOUR_DIGITS, abs=1e-6
    )
    assert single_rank_results["dpo"]["loss"][-1] < single_rank_results["dpo"]["loss"][0]


@pytest.mark.parametrize("model_type", tiny_vision.RECIPES)
def test_every_component_is_trained_unless_frozen(
    two_rank_results: Results, two_rank_folder: Path, models: dict[str, Path], model_type: str
) -> None:
    assert find_changed_components(models[model_type], two_rank_folder / model_type / "result", model_type) == {
        "vision",
        "aligner",
        "language",
    }


def test_vision_encoder_and_aligner_are_frozen_by_default(
    two_rank_results: Results, two_rank_folder: Path, models: dict[str, Path]
) -> None:
    result = two_rank_folder / "default freeze" / "result"

    assert find_changed_components(models["qwen2_vl"], result, "qwen2_vl") == {"language"}
    assert two_rank_results["default freeze"]["loss"][-1] < two_rank_results["default freeze"]["loss"][0]


def test_data_loader_processes_do_not_change_the_result(two_rank_results: Results) -> None:
    for key in ("loss", "grad_norm", "weights"):
        assert two_rank_results["loader processes"][key] == two_rank_results["qwen2_vl"][key]


def test_image_size_is_saved_with_the_result(two_rank_results: Results, two_rank_folder: Path) -> None:
    saved = json.loads((two_rank_folder / "smaller images" / "result" / "preprocessor_config.json").read_text())

    assert saved["size"] == {"shortest_edge": 28 * 28, "longest_edge": 28 * 28 * 2}
    assert two_rank_results["smaller images"]["loss"][0] != pytest.approx(
        two_rank_results["qwen2_vl"]["loss"][0], rel=1e-6
    )


def find_changed_components(base_folder: Path, result_folder: Path, model_type: str) -> set[str]:
    return {
        component
        for component, change in find_largest_changes(base_folder, result_folder, model_type).items()
        if change > 0
    }


def find_largest_changes(base_folder: Path, result_folder: Path, model_type: str) -> dict[str, float]:
    """Return the largest absolute change of a weight for each component of the model."""
    old, new = (
        AutoModelForImageTextToText.from_pretrained(folder).state_dict() for folder in (base_folder, result_folder)
    )
    assert old.keys() == new.keys()
    changes: dict[str, float] = {}
    for name, weight in old.items():
        component = find_group(name, FAMILIES[model_type])
        changes[component] = max(changes.get(component, 0.0), float((weight - new[name]).abs().max()))
    return changes


@pytest.mark.parametrize(
    "model_type", [model_type for model_type in tiny_vision.RECIPES if model_type != "gemma3"]
)  # the aligner of gemma3 has no linear layer
def test_every_component_has_adapters(two_rank_results: Results, two_rank_folder: Path, model_type: str) -> None:
    adapters = load_file(two_rank_folder / f"{model_type}, lora" / "result" / "adapter_model.safetensors")
    names = [name.removeprefix("base_model.model.") for name in adapters]

    assert {find_group(name, FAMILIES[model_type]) for name in names} == {"vision", "aligner", "language"}
