"""Models that see are trained as exactly as models that read: with images, with several, and with none on a rank."""

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText

from finetune_trainer.vision.families import FAMILIES
from finetune_trainer.vision.freeze import group_of
from testing.models import tiny_text as tiny
from testing.models import tiny_vision
from testing.processes.torchrun import Results, launch

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
SPREADING = ("zero3", "fsdp2")  # the weights, which every rank needs of the others in every layer
RATES = {"learningRate": 0.003, "visionLearningRate": 0.0003, "alignerLearningRate": 0.01}
RESUMED = ("qwen2_vl", "zero1", "zero2", "zero3", "fsdp2")
PACKING = [kind for kind in tiny_vision.KINDS if FAMILIES[kind].packs]
DPO = {"beta": 0.2, "rpoAlpha": 0.5}


def shows(number: int) -> int:
    """None in two of three rows, so that many micro-batches show nothing; then one or two."""
    return 0 if number % 3 else 1 + number % 2


def spec(
    model: Path, rows: Path, layout: tuple[int, int], source: dict[str, Any] | None = None, **fields: Any
) -> dict[str, Any]:
    """per device x accumulation; everything is trained, each part at its own rate, unless `source` says otherwise."""
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


def packed(model: Path, rows: Path, layout: tuple[int, int], **fields: Any) -> dict[str, Any]:
    made = spec(model, rows, layout, **fields)
    return {**made, "dataset": {**made["dataset"], "packing": True, "maxLength": 256}}


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_vision.rows(tmp_path_factory.mktemp("rows"), 24, images=shows)


@pytest.fixture(scope="module")
def videos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows with an image, with a video, with both and with nothing."""
    folder = tmp_path_factory.mktemp("videos")
    return tiny_vision.rows(folder, 24, images=lambda number: number % 4 // 2, videos=lambda number: number % 2)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {kind: tiny_vision.build(folder / kind, kind) for kind in tiny_vision.KINDS}


@pytest.fixture(scope="module")
def two_ranks_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("two") / "cells"


@pytest.fixture(scope="module")
def two_ranks(models: dict[str, Path], rows: Path, videos: Path, two_ranks_folder: Path) -> Results:
    cells = {kind: spec(model, rows, (1, 4)) for kind, model in models.items()}
    cells |= {f"{kind}, lora": spec(model, rows, (1, 4), lora={"r": 16}) for kind, model in models.items()}
    cells |= {
        f"{preset}{tuner}": spec(models["qwen2_vl"], rows, (1, 4), **how, **({"lora": {"r": 16}} if tuner else {}))
        for preset, how in PRESETS.items()
        for tuner in ("", ", lora")
    }
    cells |= {f"{name} (from step 2)": cells[name] for name in RESUMED}
    cells["zero2 <- qwen2_vl"], cells["qwen2_vl <- zero2"] = cells["zero2"], cells["qwen2_vl"]
    cells["dpo"] = spec(models["qwen2_vl"], tiny.pairs(rows), (1, 4), sft=None, dpo=DPO)
    cells["usually frozen"] = spec(models["qwen2_vl"], rows, (1, 4), {"freeze": None})
    cells["loader processes"] = spec(models["qwen2_vl"], rows, (1, 4))
    cells["loader processes"]["dataset"]["numWorkers"] = 1
    cells["smaller images"] = spec(models["qwen2_vl"], rows, (1, 4), {"maxPixels": 28 * 28 * 2})
    cells |= {f"{kind}, videos": spec(models[kind], videos, (1, 4)) for kind in tiny_vision.SEE_VIDEOS}
    cells |= {f"{preset}, videos": spec(models["qwen2_vl"], videos, (1, 4), **PRESETS[preset]) for preset in SPREADING}
    cells |= {f"{kind}, packed": packed(models[kind], rows, (1, 2)) for kind in PACKING}
    cells |= {f"{preset}, packed": packed(models["qwen2_vl"], rows, (1, 2), **PRESETS[preset]) for preset in SPREADING}
    cells["qwen2_vl, packed (from step 2)"] = cells["qwen2_vl, packed"]
    return launch(two_ranks_folder, cells, ranks=2)


@pytest.fixture(scope="module")
def one_rank(models: dict[str, Path], rows: Path, videos: Path, tmp_path_factory: pytest.TempPathFactory) -> Results:
    cells = {kind: spec(model, rows, (8, 1)) for kind, model in models.items()}
    cells |= {f"{kind}, lora": spec(model, rows, (8, 1), lora={"r": 16}) for kind, model in models.items()}
    cells["dpo"] = spec(models["qwen2_vl"], tiny.pairs(rows), (8, 1), sft=None, dpo=DPO)
    cells |= {f"{kind}, videos": spec(models[kind], videos, (8, 1)) for kind in tiny_vision.SEE_VIDEOS}
    cells |= {f"{kind}, packed": packed(models[kind], rows, (4, 1)) for kind in PACKING}
    return launch(tmp_path_factory.mktemp("one") / "cells", cells, ranks=1)


@pytest.mark.parametrize("what", ["loss", "grad_norm", "eval_loss"])
@pytest.mark.parametrize("tuner", ["", ", lora"])
@pytest.mark.parametrize("kind", tiny_vision.KINDS)
def test_ranks_that_show_nothing_change_no_gradient(
    two_ranks: Results, one_rank: Results, kind: str, tuner: str, what: str
) -> None:
    spread, whole = two_ranks[kind + tuner], one_rank[kind + tuner]

    assert spread[what] == pytest.approx(whole[what], rel=FOUR_DIGITS)
    assert len(whole["loss"]) == STEPS
    assert whole["loss"][-1] < whole["loss"][0]


@pytest.mark.parametrize("what", ["loss", "grad_norm", "eval_loss"])
@pytest.mark.parametrize("kind", tiny_vision.SEE_VIDEOS)
def test_videos_are_as_exact(two_ranks: Results, one_rank: Results, kind: str, what: str) -> None:
    spread, whole = two_ranks[f"{kind}, videos"], one_rank[f"{kind}, videos"]

    assert spread[what] == pytest.approx(whole[what], rel=FOUR_DIGITS)
    assert whole["loss"][-1] < whole["loss"][0]


@pytest.mark.parametrize("what", ["loss", "grad_norm", "eval_loss"])
@pytest.mark.parametrize("kind", PACKING)
def test_packs_of_rows_with_images_are_as_exact(two_ranks: Results, one_rank: Results, kind: str, what: str) -> None:
    spread, whole = two_ranks[f"{kind}, packed"], one_rank[f"{kind}, packed"]

    assert spread[what] == pytest.approx(whole[what], rel=FOUR_DIGITS)
    assert whole["loss"] != one_rank[kind]["loss"]


def test_packs_with_images_are_resumed_and_spread_like_others(two_ranks: Results) -> None:
    whole = two_ranks["qwen2_vl, packed"]

    assert two_ranks["qwen2_vl, packed (from step 2)"] == whole
    for preset in SPREADING:
        assert two_ranks[f"{preset}, packed"]["loss"] == pytest.approx(whole["loss"], rel=FOUR_DIGITS)


@pytest.mark.parametrize("preset", SPREADING)
def test_videos_are_as_exact_where_weights_are_spread(two_ranks: Results, preset: str) -> None:
    """Ranks that ran the tower more or less often than others would wait for each other without end."""
    for what in ("loss", "grad_norm", "eval_loss"):
        ddp, spread = two_ranks["qwen2_vl, videos"][what], two_ranks[f"{preset}, videos"][what]
        assert spread == pytest.approx(ddp, rel=FOUR_DIGITS), what


@pytest.mark.parametrize("tuner", ["", ", lora"])
@pytest.mark.parametrize("preset", PRESETS)
def test_weights_that_are_spread_get_the_gradients_of_ddp(two_ranks: Results, preset: str, tuner: str) -> None:
    ddp, spread = two_ranks[f"qwen2_vl{tuner}"], two_ranks[f"{preset}{tuner}"]

    for what in ("loss", "grad_norm", "eval_loss"):
        assert spread[what] == pytest.approx(ddp[what], rel=FOUR_DIGITS), what


@pytest.mark.parametrize("name", RESUMED)
def test_a_resumed_run_goes_on_with_every_rate_bit_for_bit(two_ranks: Results, name: str) -> None:
    assert two_ranks[f"{name} (from step 2)"] == two_ranks[name]


@pytest.mark.parametrize("name", ["zero2 <- qwen2_vl", "qwen2_vl <- zero2"])
def test_a_checkpoint_with_several_rates_is_read_under_another_preset(two_ranks: Results, name: str) -> None:
    assert two_ranks[name]["loss"] == pytest.approx(two_ranks["qwen2_vl"]["loss"], rel=1e-5)
    assert two_ranks[name]["eval_loss"] == pytest.approx(two_ranks["qwen2_vl"]["eval_loss"], rel=1e-5)


@pytest.mark.parametrize("name", ["qwen2_vl", *PRESETS])
def test_every_part_moves_at_its_own_rate(
    two_ranks: Results, two_ranks_folder: Path, models: dict[str, Path], name: str
) -> None:
    """AdamW moves a weight by the rate in its first step, and by about as much at most in each that follows."""
    moved = movements(models["qwen2_vl"], two_ranks_folder / name / "result", "qwen2_vl")

    for part, rate in (("language", 0.003), ("vision", 0.0003), ("aligner", 0.01)):
        assert rate * 0.9 < moved[part] < rate * STEPS, part


@pytest.mark.parametrize("what", ["loss", "grad_norm", "rewards/margins", "eval_loss"])
def test_preferences_about_images_are_as_exact(two_ranks: Results, one_rank: Results, what: str) -> None:
    assert two_ranks["dpo"][what] == pytest.approx(one_rank["dpo"][what], rel=FOUR_DIGITS, abs=1e-6)
    assert one_rank["dpo"]["loss"][-1] < one_rank["dpo"]["loss"][0]


@pytest.mark.parametrize("kind", tiny_vision.KINDS)
def test_every_part_learns_unless_it_is_frozen(
    two_ranks: Results, two_ranks_folder: Path, models: dict[str, Path], kind: str
) -> None:
    assert changed_groups(models[kind], two_ranks_folder / kind / "result", kind) == {"vision", "aligner", "language"}


def test_vision_and_aligner_are_usually_frozen(
    two_ranks: Results, two_ranks_folder: Path, models: dict[str, Path]
) -> None:
    result = two_ranks_folder / "usually frozen" / "result"

    assert changed_groups(models["qwen2_vl"], result, "qwen2_vl") == {"language"}
    assert two_ranks["usually frozen"]["loss"][-1] < two_ranks["usually frozen"]["loss"][0]


def test_loader_processes_change_no_number(two_ranks: Results) -> None:
    for what in ("loss", "grad_norm", "weights"):
        assert two_ranks["loader processes"][what] == two_ranks["qwen2_vl"][what]


def test_the_size_of_images_is_saved_with_the_result(two_ranks: Results, two_ranks_folder: Path) -> None:
    saved = json.loads((two_ranks_folder / "smaller images" / "result" / "preprocessor_config.json").read_text())

    assert saved["size"] == {"shortest_edge": 28 * 28, "longest_edge": 28 * 28 * 2}
    assert two_ranks["smaller images"]["loss"][0] != pytest.approx(two_ranks["qwen2_vl"]["loss"][0], rel=1e-6)


def changed_groups(before: Path, after: Path, kind: str) -> set[str]:
    return {part for part, moved in movements(before, after, kind).items() if moved > 0}


def movements(before: Path, after: Path, kind: str) -> dict[str, float]:
    """How far the weight went that went furthest, part by part."""
    old, new = (AutoModelForImageTextToText.from_pretrained(folder).state_dict() for folder in (before, after))
    assert old.keys() == new.keys()
    moved: dict[str, float] = {}
    for name, weight in old.items():
        part = group_of(name, FAMILIES[kind])
        moved[part] = max(moved.get(part, 0.0), float((weight - new[name]).abs().max()))
    return moved


@pytest.mark.parametrize("kind", [kind for kind in tiny_vision.KINDS if kind != "gemma3"])  # its aligner has no layer
def test_adapters_are_in_every_part(two_ranks: Results, two_ranks_folder: Path, kind: str) -> None:
    adapters = load_file(two_ranks_folder / f"{kind}, lora" / "result" / "adapter_model.safetensors")
    names = [name.removeprefix("base_model.model.") for name in adapters]

    assert {group_of(name, FAMILIES[kind]) for name in names} == {"vision", "aligner", "language"}
