"""What is learned depends on the effective batch, not on how ranks, micro-batches and accumulation share it."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from testing.fakes.hub import TOKEN, FakeHub, serve_hub
from testing.models import tiny_text as tiny
from testing.processes.torchrun import Results, launch

pytestmark = pytest.mark.slow

STEPS = 6  # 60 rows in steps of 16: the fourth step of each epoch takes the 12 that are left
FOUR_DIGITS = 1e-4
PAIRS, WEIGHTED = ".pairs", ".weighted"
DPO = {"beta": 0.2, "rpoAlpha": 0.5}
PACKED = {"packing": True, "maxLength": 300}
FROM_HUB = [{"name": "acme/rows"}]
NF4 = {"r": 16, "quantization": "nf4"}
RESUMED: dict[str, Any] = {
    "dataset": PACKED,
    "lora": {"r": 16, "loraDropout": 0.1},
    "training": {"saveSteps": 2, "saveTotalLimit": 9},
}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tiny.Tiny:
    built = tiny.build(tmp_path_factory.mktemp("tiny"), rows=60, eval_rows=13)
    for file in (built.train, built.eval):
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        tiny.write_jsonl(file.with_suffix(f"{WEIGHTED}.jsonl"), [weigh(row, n) for n, row in enumerate(rows)])
    return built


def weigh(row: dict[str, Any], number: int) -> dict[str, Any]:
    question, answer = row["messages"]
    return {"messages": [question, {**answer, "weight": (0.25, 0.5, 1)[number % 3]}]}


def spec(
    files: tiny.Tiny,
    layout: tuple[int, int | str, int | None],
    *,
    model: Path | None = None,
    workers: int = 0,
    torch_dtype: str = "auto",
    attention: str = "auto",
    rows: str = "",
    dataset: dict[str, Any] | None = None,
    **fields: Any,
) -> dict[str, Any]:
    """world x per device x accumulation, as in 2x1x8; `rows` names another spelling of the same rows."""
    world_size, per_device, accumulation = layout
    training = {
        "perDeviceTrainBatchSize": per_device,
        **({} if accumulation is None else {"gradientAccumulationSteps": accumulation}),
        "learningRate": 0.01,
        "maxSteps": STEPS,
        "saveSteps": 1000,
        **fields.pop("training", {}),
    }
    return {
        "model": {
            "name": str(model or files.model),
            "torchDtype": torch_dtype,
            "attnImplementation": attention,
        },
        "dataset": {
            "train": [{"name": str(files.train.with_suffix(f"{rows}.jsonl"))}],
            "eval": [{"name": str(files.eval.with_suffix(f"{rows}.jsonl"))}],
            "numWorkers": workers,
            **(dataset or {}),
        },
        "sft": {},
        "lora": {"r": 16},
        "training": training,
        "nprocPerNode": world_size,
        "output": {"persistentVolumeClaim": {"claimName": "unused"}},
        **fields,
    }


@pytest.fixture(scope="module")
def broken_model(files: tiny.Tiny, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its loss is not a number."""
    folder = tmp_path_factory.mktemp("broken")
    for file in files.model.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"][0] = float("inf")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def two_ranks_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("two") / "cells"


@pytest.fixture(scope="module")
def hub(files: tiny.Tiny) -> Iterator[FakeHub]:
    with serve_hub() as hub, pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_ENDPOINT", hub.address)
        patch.setenv("HF_TOKEN", TOKEN)
        hub.datasets["acme/rows"] = {
            "train.jsonl": files.train.read_bytes(),
            "validation.jsonl": files.eval.read_bytes(),
        }
        yield hub


@pytest.fixture(scope="module")
def two_ranks(files: tiny.Tiny, broken_model: Path, two_ranks_folder: Path, hub: FakeHub) -> Results:
    per_rank_mean = {"averageTokensAcrossDevices": False}
    cells = {
        "2x1x8": spec(files, (2, 1, 8)),
        "2x4x2": spec(files, (2, 4, 2)),
        "2x4x2, loader processes": spec(files, (2, 4, 2), workers=1),
        "2x4x2, bfloat16": spec(files, (2, 4, 2), torch_dtype="bfloat16", training={"maxSteps": 2}),
        "2x8x1, mean per rank": spec(files, (2, 8, 1), training=per_rank_mean),
        "2x4x2, full": spec(files, (2, 4, 2), lora=None, training={"learningRate": 0.001}),
        "2x4x2, full, checkpointing": spec(
            files, (2, 4, 2), lora=None, training={"learningRate": 0.001, "gradientCheckpointing": True}
        ),
        "2x4x2, full, bfloat16": spec(
            files, (2, 4, 2), lora=None, torch_dtype="bfloat16", training={"learningRate": 0.001, "maxSteps": 2}
        ),
        "2x4x2, 4 bits": spec(files, (2, 4, 2), lora=NF4, training={"saveSteps": 2, "saveTotalLimit": 9}),
        "2x4x2, 4 bits (from step 2)": spec(files, (2, 4, 2), lora=NF4, training={"saveSteps": 2, "saveTotalLimit": 9}),
        "2x4x2, 4 bits, zero2": spec(files, (2, 4, 2), lora=NF4, deepspeed={"preset": "zero2"}),
        "2x4x2, 4 bits, dpo": spec(files, (2, 4, 2), lora=NF4, sft=None, dpo=DPO, rows=PAIRS),
        "2x4x2, dpo": spec(files, (2, 4, 2), sft=None, dpo=DPO, rows=PAIRS),
        "2x1x8, dpo": spec(files, (2, 1, 8), sft=None, dpo=DPO, rows=PAIRS),
        "2x4x2, from the Hub": spec(files, (2, 4, 2), dataset={"train": FROM_HUB, "eval": FROM_HUB}),
        "2x8x1, pushed": spec(
            files,
            (2, 8, 1),
            training={"maxSteps": 1},
            output={"persistentVolumeClaim": {"claimName": "unused"}, "pushToHub": {"repo": "acme/support"}},
        ),
        "2x4x2, weighted": spec(files, (2, 4, 2), rows=WEIGHTED),
        "2x2x1, packed": spec(files, (2, 2, 1), dataset=PACKED),
        "2x2x1, packed, dropout": spec(files, (2, 2, 1), **RESUMED),
        "2x2x1, packed, dropout (from step 2)": spec(files, (2, 2, 1), **RESUMED),
        "2x2x1, packed, dropout, probe": spec(
            files, (2, 2, 1), **{**RESUMED, "training": {**RESUMED["training"], "probe": True}}
        ),
        "2x4x2 (mixed)": spec(files, (2, 4, 2)),
        "2x8x1 (mixed)": spec(files, (2, 8, 1), training={"maxSteps": 1, "allowMixedHardware": True}),
        "auto (in 846 MiB)": spec(files, (2, "auto", None), training={"globalBatchSize": 16}),
        "auto, bfloat16 (at most 7 sequences)": spec(
            files, (2, "auto", None), torch_dtype="bfloat16", training={"globalBatchSize": 16, "maxSteps": 2}
        ),
        "auto, dpo (at most 8 sequences)": spec(
            files, (2, "auto", None), sft=None, dpo=DPO, rows=PAIRS, training={"globalBatchSize": 16}
        ),
        "auto, packed, dropout (at most 9 sequences)": spec(
            files,
            (2, "auto", None),
            **{**RESUMED, "training": {**RESUMED["training"], "globalBatchSize": 4}},
        ),
        "2x4x2, not finite": spec(files, (2, 4, 2), model=broken_model),
    }
    return launch(two_ranks_folder, cells, ranks=2)


@pytest.fixture(scope="module")
def one_rank(files: tiny.Tiny, tmp_path_factory: pytest.TempPathFactory) -> Results:
    per_rank_mean = {"averageTokensAcrossDevices": False}
    cells = {
        "1x16x1": spec(files, (1, 16, 1), training={"perDeviceEvalBatchSize": 5}),
        "1x16x1 (again)": spec(files, (1, 16, 1), training={"perDeviceEvalBatchSize": 5}),
        "1x1x16": spec(files, (1, 1, 16)),
        "1x16x1, mean per rank": spec(files, (1, 16, 1), training=per_rank_mean),
        "1x4x1, packed": spec(files, (1, 4, 1), dataset=PACKED),
        "1x4x1, packed, eager": spec(files, (1, 4, 1), dataset=PACKED, attention="eager"),
        "1x16x1, dpo": spec(files, (1, 16, 1), sft=None, dpo=DPO, rows=PAIRS),
        "1x16x1, 4 bits": spec(files, (1, 16, 1), lora=NF4),
        "1x16x1, weighted": spec(files, (1, 16, 1), rows=WEIGHTED),
        "1x16x1, full": spec(files, (1, 16, 1), lora=None, training={"learningRate": 0.001}),
    }
    return launch(tmp_path_factory.mktemp("one") / "cells", cells, ranks=1)


@pytest.mark.parametrize("what", ["loss", "grad_norm", "eval_loss"])
def test_every_layout_logs_the_same_numbers(two_ranks: Results, one_rank: Results, what: str) -> None:
    layouts = [two_ranks["2x1x8"], two_ranks["2x4x2"], one_rank["1x16x1"], one_rank["1x1x16"]]

    assert len(layouts[0][what]) == (1 if what == "eval_loss" else STEPS)
    for layout in layouts[1:]:
        assert layout[what] == pytest.approx(layouts[0][what], rel=FOUR_DIGITS)


def test_full_tuning_is_as_exact(two_ranks: Results, one_rank: Results) -> None:
    for what in ("loss", "grad_norm", "eval_loss"):
        assert two_ranks["2x4x2, full"][what] == pytest.approx(one_rank["1x16x1, full"][what], rel=FOUR_DIGITS)


@pytest.mark.parametrize("what", ["loss", "grad_norm", "rewards/margins", "eval_loss", "eval_rewards/accuracies"])
def test_preferences_are_as_exact(two_ranks: Results, one_rank: Results, what: str) -> None:
    for layout in ("2x4x2, dpo", "2x1x8, dpo"):
        assert two_ranks[layout][what] == pytest.approx(one_rank["1x16x1, dpo"][what], rel=FOUR_DIGITS, abs=1e-6)
    assert one_rank["1x16x1, dpo"]["loss"][-1] < one_rank["1x16x1, dpo"]["loss"][0] - 0.01


@pytest.mark.parametrize("what", ["loss", "grad_norm", "eval_loss"])
def test_weights_of_messages_are_as_exact_and_count(two_ranks: Results, one_rank: Results, what: str) -> None:
    assert two_ranks["2x4x2, weighted"][what] == pytest.approx(one_rank["1x16x1, weighted"][what], rel=FOUR_DIGITS)
    assert two_ranks["2x4x2, weighted"][what] != pytest.approx(two_ranks["2x4x2"][what], rel=FOUR_DIGITS)


@pytest.mark.parametrize("what", ["loss", "grad_norm", "eval_loss"])
def test_packs_are_as_exact(two_ranks: Results, one_rank: Results, what: str) -> None:
    assert two_ranks["2x2x1, packed"][what] == pytest.approx(one_rank["1x4x1, packed"][what], rel=FOUR_DIGITS)


@pytest.mark.parametrize("what", ["loss", "grad_norm", "eval_loss"])
def test_adapters_on_4_bit_weights_are_as_exact(two_ranks: Results, one_rank: Results, what: str) -> None:
    for spread in ("2x4x2, 4 bits", "2x4x2, 4 bits, zero2"):
        assert two_ranks[spread][what] == pytest.approx(one_rank["1x16x1, 4 bits"][what], rel=FOUR_DIGITS), spread
    whole = two_ranks["2x4x2"]
    assert two_ranks["2x4x2, 4 bits"][what] != pytest.approx(whole[what], rel=FOUR_DIGITS), "4 bits say less"
    assert two_ranks["2x4x2, 4 bits"][what] == pytest.approx(whole[what], rel=0.2)


def test_adapters_on_4_bit_weights_resume_as_if_they_had_never_stopped(two_ranks: Results) -> None:
    assert two_ranks["2x4x2, 4 bits (from step 2)"] == two_ranks["2x4x2, 4 bits"]


def test_preferences_on_4_bit_weights_begin_at_their_own_reference(two_ranks: Results) -> None:
    """The model without its adapters, in 4 bits too: no reward before the first step."""
    found = two_ranks["2x4x2, 4 bits, dpo"]

    assert found["rewards/margins"][0] == pytest.approx(0, abs=1e-6)
    assert found["rewards/margins"][-1] > 0.01


@pytest.mark.parametrize("what", ["loss", "grad_norm", "eval_loss"])
def test_how_attention_is_computed_changes_nothing_but_rounding(one_rank: Results, what: str) -> None:
    sdpa, eager = one_rank["1x4x1, packed"], one_rank["1x4x1, packed, eager"]

    assert eager[what] == pytest.approx(sdpa[what], rel=FOUR_DIGITS)
    assert eager["weights"] != sdpa["weights"], "it was another implementation"


def test_packed_training_resumed_in_the_middle_of_an_epoch_is_as_if_it_had_never_stopped(two_ranks: Results) -> None:
    whole, resumed = two_ranks["2x2x1, packed, dropout"], two_ranks["2x2x1, packed, dropout (from step 2)"]

    assert resumed == whole
    assert whole["loss"] != two_ranks["2x2x1, packed"]["loss"], "dropout draws from the generators, which resumed too"


def test_a_probe_changes_no_bit(two_ranks: Results) -> None:
    assert two_ranks["2x2x1, packed, dropout, probe"] == two_ranks["2x2x1, packed, dropout"]


@pytest.mark.parametrize(
    ("auto", "written"),
    [
        pytest.param("auto (in 846 MiB)", "2x4x2", id="by forecast"),
        pytest.param("auto, bfloat16 (at most 7 sequences)", "2x4x2, bfloat16", id="tried"),
        pytest.param("auto, dpo (at most 8 sequences)", "2x4x2, dpo", id="tried, dpo"),
        pytest.param("auto, packed, dropout (at most 9 sequences)", "2x2x1, packed, dropout", id="tried, and all fit"),
    ],
)
def test_auto_finds_what_fits_on_every_rank_and_changes_no_bit(two_ranks: Results, auto: str, written: str) -> None:
    assert two_ranks[auto] == two_ranks[written]


@pytest.mark.parametrize("what", ["loss", "grad_norm"])
def test_a_mean_per_rank_differs_between_layouts(two_ranks: Results, one_rank: Results, what: str) -> None:
    """With averageTokensAcrossDevices off, short answers weigh more where they share a rank with short ones."""
    spread, alone = two_ranks["2x8x1, mean per rank"][what], one_rank["1x16x1, mean per rank"][what]

    assert max(abs(one / other - 1) for one, other in zip(spread, alone, strict=True)) > 10 * FOUR_DIGITS
    assert alone == pytest.approx(one_rank["1x16x1"][what], rel=FOUR_DIGITS)  # one rank: nothing to average over


def test_loader_processes_change_no_number(two_ranks: Results) -> None:
    assert two_ranks["2x4x2, loader processes"] == two_ranks["2x4x2"]


def test_bfloat16_trains_alike_with_fewer_digits(two_ranks: Results) -> None:
    assert two_ranks["2x4x2, bfloat16"]["loss"] == pytest.approx(two_ranks["2x4x2"]["loss"][:2], rel=0.01)
    assert two_ranks["2x4x2, bfloat16"]["loss"] != pytest.approx(two_ranks["2x4x2"]["loss"][:2], rel=1e-6)


def test_a_job_that_died_after_its_last_step_only_publishes(one_rank: Results) -> None:
    assert one_rank["1x16x1 (again)"] == one_rank["1x16x1"]


def test_gradient_checkpointing_changes_memory_and_no_number(two_ranks: Results) -> None:
    assert two_ranks["2x4x2, full, checkpointing"]["loss"] == pytest.approx(
        two_ranks["2x4x2, full"]["loss"], rel=FOUR_DIGITS
    )


def test_a_full_result_loads_in_plain_transformers_in_the_type_that_was_asked_for(
    two_ranks: Results, two_ranks_folder: Path, files: tiny.Tiny
) -> None:
    assert len(two_ranks["2x4x2, full, bfloat16"]["loss"]) == 2
    trained = AutoModelForCausalLM.from_pretrained(two_ranks_folder / "2x4x2, full, bfloat16" / "result")
    base = AutoModelForCausalLM.from_pretrained(files.model)

    assert trained.dtype is torch.bfloat16
    assert not torch.equal(trained.lm_head.weight, base.lm_head.weight.bfloat16())
    assert trained.lm_head.weight is trained.model.embed_tokens.weight


def test_an_adapter_loads_in_plain_peft_and_has_learned(
    two_ranks: Results, two_ranks_folder: Path, files: tiny.Tiny
) -> None:
    base = AutoModelForCausalLM.from_pretrained(files.model)

    adapted = PeftModel.from_pretrained(base, str(two_ranks_folder / "2x4x2" / "result"))

    learned = {name: weight for name, weight in adapted.named_parameters() if "lora_B" in name}
    assert len(learned) == 14  # seven linear layers in two blocks
    assert all(weight.abs().sum() > 0 for weight in learned.values())
    assert two_ranks["2x4x2"]["loss"][-1] < two_ranks["2x4x2"]["loss"][0] - 0.1


def test_a_loss_that_is_no_number_ends_the_job_at_its_step_before_anything_is_saved(
    two_ranks: Results, two_ranks_folder: Path
) -> None:
    assert two_ranks["2x4x2, not finite"]["error"] == "NonFiniteLoss"
    assert "at step 1;" in two_ranks["2x4x2, not finite"]["message"]
    assert list((two_ranks_folder / "2x4x2, not finite" / "checkpoints").iterdir()) == []


def test_ranks_that_differ_are_refused_before_anything_is_written_unless_they_may(
    two_ranks: Results, two_ranks_folder: Path
) -> None:
    assert two_ranks["2x4x2 (mixed)"]["error"] == "MixedHardware"
    assert "NVIDIA L4 on node 0 rank 1." in two_ranks["2x4x2 (mixed)"]["message"]
    assert not (two_ranks_folder / "2x4x2 (mixed)" / "checkpoints").exists()
    assert len(two_ranks["2x8x1 (mixed)"]["loss"]) == 1


def test_rows_from_the_hub_are_learned_as_those_of_a_volume(two_ranks: Results) -> None:
    assert two_ranks["2x4x2, from the Hub"] == two_ranks["2x4x2"]


def test_what_is_on_the_hub_is_the_result(two_ranks: Results, two_ranks_folder: Path, hub: FakeHub) -> None:
    assert len(two_ranks["2x8x1, pushed"]["loss"]) == 1
    result = two_ranks_folder / "2x8x1, pushed" / "result"
    files = {str(file.relative_to(result)): file.read_bytes() for file in result.rglob("*") if file.is_file()}
    del files["SUCCESS"]  # which is written when all else is done
    assert hub.repositories["acme/support"] == files
    assert hub.visibility == {"acme/support": "private"}
