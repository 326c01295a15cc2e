"""Vision-language models train the same for every layout and sharding, also if a rank has no images."""

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText

from finetune_trainer.vision.families import FAMILIES
from finetune_trainer.vision.freeze import find_group
from testing.models import tiny_text, tiny_vision
from testing.processes.torchrun import Results, run_cells

pytestmark = pytest.mark.slow

STEPS = 3
FOUR_DIGITS = 1e-4
PRESETS: dict[str, dict[str, Any]] = {
    **{
        preset: {"deepspeed": {"preset": preset}}
        for preset in ("zero1", "zero2", "zero2_offload", "zero3", "zero3_offload")
    },
    "fsdp2": {"fsdp": {}},
}
WEIGHT_SHARDING = ("zero3", "fsdp2")  # every rank gathers the weights of every layer from the others
RATES = {"learningRate": 0.003, "visionLearningRate": 0.0003, "alignerLearningRate": 0.01}
RESUMED = ("qwen2_vl", "zero1", "zero2", "zero3", "fsdp2")
PACKING = [kind for kind in tiny_vision.RECIPES if FAMILIES[kind].supports_packing]
DPO = {"beta": 0.2, "rpoAlpha": 0.5}


def image_count(number: int) -> int:
    """Return 0 for two of three rows, so that many micro-batches have no image, otherwise 1 or 2."""
    return 0 if number % 3 else 1 + number % 2


def spec(
    model: Path, rows: Path, layout: tuple[int, int], source: dict[str, Any] | None = None, **fields: Any
) -> dict[str, Any]:
    """Build a spec for a layout of per device and accumulation; all parts are trained, each with its own learning rate.

    `source` changes spec.model; with it, and with LoRA, there is one learning rate.
    """
    per_device, accumulation = layout
    training = {
        "perDeviceTrainBatchSize": per_device,
        "gradientAccumulationSteps": accumulation,
        "maxSteps": STEPS,
        "saveSteps": 2,
        "weightDecay": 0.1,
        **(RATES if source is None and "lora" not in fields else {"learningRate": 0.003}),
    }
    return {
        "model": {"name": str(model), "freeze": [], **(source or {})},
        "dataset": {"train": [{"name": str(rows)}], "eval": [{"name": str(rows)}], "numWorkers": 0},
        "sft": {},
        "training": training,
        "output": {"persistentVolumeClaim": {"claimName": "unused"}},
        **fields,
    }


def packed_spec(model: Path, rows: Path, layout: tuple[int, int], **fields: Any) -> dict[str, Any]:
    job_spec = spec(model, rows, layout, **fields)
    return {**job_spec, "dataset": {**job_spec["dataset"], "packing": True, "maxLength": 256}}


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_vision.write_rows(tmp_path_factory.mktemp("rows"), 24, images=image_count)


@pytest.fixture(scope="module")
def videos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write rows with an image, a video, both, and neither."""
    folder = tmp_path_factory.mktemp("videos")
    return tiny_vision.write_rows(folder, 24, images=lambda number: number % 4 // 2, videos=lambda number: number % 2)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {kind: tiny_vision.build(folder / kind, kind) for kind in tiny_vision.RECIPES}


@pytest.fixture(scope="module")
def two_ranks_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("two") / "cells"


@pytest.fixture(scope="module")
def two_ranks(models: dict[str, Path], rows: Path, videos: Path, two_ranks_folder: Path) -> Results:
    cells = {kind: spec(model, rows, (1, 4)) for kind, model in models.items()}
    cells |= {f"{kind}, lora": spec(model, rows, (1, 4), lora={"r": 16}) for kind, model in models.items()}
    cells |= {
        f"{preset}{tuner}": spec(models["qwen2_vl"], rows, (1, 4), **sharding, **({"lora": {"r": 16}} if tuner else {}))
        for preset, sharding in PRESETS.items()
        for tuner in ("", ", lora")
    }
    cells |= {f"{name} (from step 2)": cells[name] for name in RESUMED}
    cells["zero2 <- qwen2_vl"], cells["qwen2_vl <- zero2"] = cells["zero2"], cells["qwen2_vl"]
    cells["dpo"] = spec(models["qwen2_vl"], tiny_text.preferences_path(rows), (1, 4), sft=None, dpo=DPO)
    cells["default freeze"] = spec(models["qwen2_vl"], rows, (1, 4), {"freeze": None})
    cells["loader processes"] = spec(models["qwen2_vl"], rows, (1, 4))
    cells["loader processes"]["dataset"]["numWorkers"] = 1
    cells["smaller images"] = spec(models["qwen2_vl"], rows, (1, 4), {"maxPixels": 28 * 28 * 2})
    cells |= {f"{kind}, videos": spec(models[kind], videos, (1, 4)) for kind in tiny_vision.VIDEO_MODEL_TYPES}
    cells |= {
        f"{preset}, videos": spec(models["qwen2_vl"], videos, (1, 4), **PRESETS[preset]) for preset in WEIGHT_SHARDING
    }
    cells |= {f"{kind}, packed": packed_spec(models[kind], rows, (1, 2)) for kind in PACKING}
    cells |= {
        f"{preset}, packed": packed_spec(models["qwen2_vl"], rows, (1, 2), **PRESETS[preset])
        for preset in WEIGHT_SHARDING
    }
    cells["qwen2_vl, packed (from step 2)"] = cells["qwen2_vl, packed"]
    return run_cells(two_ranks_folder, cells, ranks=2)


@pytest.fixture(scope="module")
def one_rank(models: dict[str, Path], rows: Path, videos: Path, tmp_path_factory: pytest.TempPathFactory) -> Results:
    cells = {kind: spec(model, rows, (8, 1)) for kind, model in models.items()}
    cells |= {f"{kind}, lora": spec(model, rows, (8, 1), lora={"r": 16}) for kind, model in models.items()}
    cells["dpo"] = spec(models["qwen2_vl"], tiny_text.preferences_path(rows), (8, 1), sft=None, dpo=DPO)
    cells |= {f"{kind}, videos": spec(models[kind], videos, (8, 1)) for kind in tiny_vision.VIDEO_MODEL_TYPES}
    cells |= {f"{kind}, packed": packed_spec(models[kind], rows, (4, 1)) for kind in PACKING}
    return run_cells(tmp_path_factory.mktemp("one") / "cells", cells, ranks=1)


@pytest.mark.parametrize("metric", ["loss", "grad_norm", "eval_loss"])
@pytest.mark.parametrize("tuner", ["", ", lora"])
@pytest.mark.parametrize("kind", tiny_vision.RECIPES)
def test_ranks_without_images_do_not_change_gradients(
    two_ranks: Results, one_rank: Results, kind: str, tuner: str, metric: str
) -> None:
    two, one = two_ranks[kind + tuner], one_rank[kind + tuner]

    assert two[metric] == pytest.approx(one[metric], rel=FOUR_DIGITS)
    assert len(one["loss"]) == STEPS
    assert one["loss"][-1] < one["loss"][0]


@pytest.mark.parametrize("metric", ["loss", "grad_norm", "eval_loss"])
@pytest.mark.parametrize("kind", tiny_vision.VIDEO_MODEL_TYPES)
def test_videos_do_not_depend_on_the_layout(two_ranks: Results, one_rank: Results, kind: str, metric: str) -> None:
    two, one = two_ranks[f"{kind}, videos"], one_rank[f"{kind}, videos"]

    assert two[metric] == pytest.approx(one[metric], rel=FOUR_DIGITS)
    assert one["loss"][-1] < one["loss"][0]


@pytest.mark.parametrize("metric", ["loss", "grad_norm", "eval_loss"])
@pytest.mark.parametrize("kind", PACKING)
def test_packed_images_do_not_depend_on_the_layout(
    two_ranks: Results, one_rank: Results, kind: str, metric: str
) -> None:
    two, one = two_ranks[f"{kind}, packed"], one_rank[f"{kind}, packed"]

    assert two[metric] == pytest.approx(one[metric], rel=FOUR_DIGITS)
    assert one["loss"] != one_rank[kind]["loss"]


def test_packed_images_can_be_resumed_and_sharded(two_ranks: Results) -> None:
    reference = two_ranks["qwen2_vl, packed"]

    assert two_ranks["qwen2_vl, packed (from step 2)"] == reference
    for preset in WEIGHT_SHARDING:
        assert two_ranks[f"{preset}, packed"]["loss"] == pytest.approx(reference["loss"], rel=FOUR_DIGITS)


@pytest.mark.parametrize("preset", WEIGHT_SHARDING)
def test_videos_do_not_depend_on_the_sharding(two_ranks: Results, preset: str) -> None:
    """Ranks that call the vision encoder a different number of times would deadlock."""
    for metric in ("loss", "grad_norm", "eval_loss"):
        ddp, sharded = two_ranks["qwen2_vl, videos"][metric], two_ranks[f"{preset}, videos"][metric]
        assert sharded == pytest.approx(ddp, rel=FOUR_DIGITS), metric


@pytest.mark.parametrize("tuner", ["", ", lora"])
@pytest.mark.parametrize("preset", PRESETS)
def test_every_sharding_has_the_losses_of_ddp(two_ranks: Results, preset: str, tuner: str) -> None:
    ddp, sharded = two_ranks[f"qwen2_vl{tuner}"], two_ranks[f"{preset}{tuner}"]

    for metric in ("loss", "grad_norm", "eval_loss"):
        assert sharded[metric] == pytest.approx(ddp[metric], rel=FOUR_DIGITS), metric


@pytest.mark.parametrize("name", RESUMED)
def test_a_resumed_run_with_several_rates_equals_the_uninterrupted_one(two_ranks: Results, name: str) -> None:
    assert two_ranks[f"{name} (from step 2)"] == two_ranks[name]


@pytest.mark.parametrize("name", ["zero2 <- qwen2_vl", "qwen2_vl <- zero2"])
def test_a_checkpoint_with_several_rates_can_be_resumed_with_another_sharding(two_ranks: Results, name: str) -> None:
    assert two_ranks[name]["loss"] == pytest.approx(two_ranks["qwen2_vl"]["loss"], rel=1e-5)
    assert two_ranks[name]["eval_loss"] == pytest.approx(two_ranks["qwen2_vl"]["eval_loss"], rel=1e-5)


@pytest.mark.parametrize("name", ["qwen2_vl", *PRESETS])
def test_every_part_is_trained_with_its_own_rate(
    two_ranks: Results, two_ranks_folder: Path, models: dict[str, Path], name: str
) -> None:
    """AdamW changes a weight by the learning rate in the first step, and by about that at most in later ones."""
    changes = largest_changes(models["qwen2_vl"], two_ranks_folder / name / "result", "qwen2_vl")

    for part, rate in (("language", 0.003), ("vision", 0.0003), ("aligner", 0.01)):
        assert rate * 0.9 < changes[part] < rate * STEPS, part


@pytest.mark.parametrize("metric", ["loss", "grad_norm", "rewards/margins", "eval_loss"])
def test_dpo_with_images_does_not_depend_on_the_layout(two_ranks: Results, one_rank: Results, metric: str) -> None:
    assert two_ranks["dpo"][metric] == pytest.approx(one_rank["dpo"][metric], rel=FOUR_DIGITS, abs=1e-6)
    assert one_rank["dpo"]["loss"][-1] < one_rank["dpo"]["loss"][0]


@pytest.mark.parametrize("kind", tiny_vision.RECIPES)
def test_every_part_is_trained_unless_frozen(
    two_ranks: Results, two_ranks_folder: Path, models: dict[str, Path], kind: str
) -> None:
    assert changed_groups(models[kind], two_ranks_folder / kind / "result", kind) == {"vision", "aligner", "language"}


def test_vision_and_aligner_are_frozen_by_default(
    two_ranks: Results, two_ranks_folder: Path, models: dict[str, Path]
) -> None:
    result = two_ranks_folder / "default freeze" / "result"

    assert changed_groups(models["qwen2_vl"], result, "qwen2_vl") == {"language"}
    assert two_ranks["default freeze"]["loss"][-1] < two_ranks["default freeze"]["loss"][0]


def test_loader_processes_do_not_change_the_result(two_ranks: Results) -> None:
    for key in ("loss", "grad_norm", "weights"):
        assert two_ranks["loader processes"][key] == two_ranks["qwen2_vl"][key]


def test_the_image_size_is_saved_with_the_result(two_ranks: Results, two_ranks_folder: Path) -> None:
    saved = json.loads((two_ranks_folder / "smaller images" / "result" / "preprocessor_config.json").read_text())

    assert saved["size"] == {"shortest_edge": 28 * 28, "longest_edge": 28 * 28 * 2}
    assert two_ranks["smaller images"]["loss"][0] != pytest.approx(two_ranks["qwen2_vl"]["loss"][0], rel=1e-6)


def changed_groups(before: Path, after: Path, kind: str) -> set[str]:
    return {part for part, change in largest_changes(before, after, kind).items() if change > 0}


def largest_changes(before: Path, after: Path, kind: str) -> dict[str, float]:
    """Return the largest absolute change of a weight, by part of the model."""
    old, new = (AutoModelForImageTextToText.from_pretrained(folder).state_dict() for folder in (before, after))
    assert old.keys() == new.keys()
    changes: dict[str, float] = {}
    for name, weight in old.items():
        part = find_group(name, FAMILIES[kind])
        changes[part] = max(changes.get(part, 0.0), float((weight - new[name]).abs().max()))
    return changes


@pytest.mark.parametrize(
    "kind", [kind for kind in tiny_vision.RECIPES if kind != "gemma3"]
)  # its aligner has no linear layer
def test_every_part_has_adapters(two_ranks: Results, two_ranks_folder: Path, kind: str) -> None:
    adapters = load_file(two_ranks_folder / f"{kind}, lora" / "result" / "adapter_model.safetensors")
    names = [name.removeprefix("base_model.model.") for name in adapters]

    assert {find_group(name, FAMILIES[kind]) for name in names} == {"vision", "aligner", "language"}
