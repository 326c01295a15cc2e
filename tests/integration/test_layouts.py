"""Tests that results depend only on the effective batch, not on ranks, micro-batch size and accumulation."""

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
from testing.models import tiny_text
from testing.processes.launches import Results, run_cells

pytestmark = pytest.mark.slow

STEPS = 6  # with 60 rows and an effective batch of 16, the fourth step of each epoch has 12 rows
FOUR_DIGITS = 1e-4
PAIRS, WEIGHTED = ".pairs", ".weighted"
DPO = {"beta": 0.2, "rpoAlpha": 0.5}
PACKED_DATASET = {"packing": True, "maxLength": 300}
FROM_HUB = [{"name": "acme/rows"}]
NF4_LORA = {"r": 16, "quantization": "nf4"}
RESUMABLE_FIELDS: dict[str, Any] = {
    "dataset": PACKED_DATASET,
    "lora": {"r": 16, "loraDropout": 0.1},
    "training": {"saveSteps": 2, "saveTotalLimit": 9},
}


@pytest.fixture(scope="module")
def tiny_files(tmp_path_factory: pytest.TempPathFactory) -> tiny_text.TinyFiles:
    tiny_files = tiny_text.build(tmp_path_factory.mktemp("tiny"), rows=60, eval_rows=13)
    for file in (tiny_files.train, tiny_files.eval):
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        tiny_text.write_jsonl(file.with_suffix(f"{WEIGHTED}.jsonl"), [add_weight(row, n) for n, row in enumerate(rows)])
    return tiny_files


def add_weight(row: dict[str, Any], row_number: int) -> dict[str, Any]:
    question, answer = row["messages"]
    return {"messages": [question, {**answer, "weight": (0.25, 0.5, 1)[row_number % 3]}]}


def build_spec(
    tiny_files: tiny_text.TinyFiles,
    batch_layout: tuple[int, int | str, int | None],
    *,
    model: Path | None = None,
    loader_processes: int = 0,
    torch_dtype: str = "auto",
    attention: str = "auto",
    row_variant: str = "",
    dataset: dict[str, Any] | None = None,
    **fields: Any,
) -> dict[str, Any]:
    """Build a spec with the given world size, micro-batch size and accumulation steps.

    `batch_layout`: these three numbers. `row_variant`: suffix of the names of the row files.
    """
    world_size, micro_batch_size, accumulation = batch_layout
    training = {
        "perDeviceTrainBatchSize": micro_batch_size,
        **({} if accumulation is None else {"gradientAccumulationSteps": accumulation}),
        "learningRate": 0.01,
        "maxSteps": STEPS,
        "saveSteps": 1000,
        "preflight": {"enabled": False},
        **fields.pop("training", {}),
    }
    return {
        "model": {
            "name": str(model or tiny_files.model),
            "torchDtype": torch_dtype,
            "attnImplementation": attention,
        },
        "dataset": {
            "train": [{"name": str(tiny_files.train.with_suffix(f"{row_variant}.jsonl"))}],
            "eval": [{"name": str(tiny_files.eval.with_suffix(f"{row_variant}.jsonl"))}],
            "numWorkers": loader_processes,
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
def broken_model(tiny_files: tiny_text.TinyFiles, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create a model whose loss is NaN."""
    folder = tmp_path_factory.mktemp("broken")
    for file in tiny_files.model.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"][0] = float("inf")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def two_rank_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("two") / "cells"


@pytest.fixture(scope="module")
def hub(tiny_files: tiny_text.TinyFiles) -> Iterator[FakeHub]:
    with serve_hub() as hub, pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_ENDPOINT", hub.address)
        patch.setenv("HF_TOKEN", TOKEN)
        hub.datasets["acme/rows"] = {
            "train.jsonl": tiny_files.train.read_bytes(),
            "validation.jsonl": tiny_files.eval.read_bytes(),
        }
        yield hub


@pytest.fixture(scope="module")
def two_rank_results(
    tiny_files: tiny_text.TinyFiles, broken_model: Path, two_rank_folder: Path, hub: FakeHub
) -> Results:
    per_rank_mean = {"averageTokensAcrossDevices": False}
    cells = {
        "2x1x8": build_spec(tiny_files, (2, 1, 8)),
        "2x4x2": build_spec(tiny_files, (2, 4, 2)),
        "2x4x2, loader processes": build_spec(tiny_files, (2, 4, 2), loader_processes=1),
        "2x4x2, bfloat16": build_spec(tiny_files, (2, 4, 2), torch_dtype="bfloat16", training={"maxSteps": 2}),
        "2x8x1, mean per rank": build_spec(tiny_files, (2, 8, 1), training=per_rank_mean),
        "2x4x2, full": build_spec(tiny_files, (2, 4, 2), lora=None, training={"learningRate": 0.001}),
        "2x4x2, full, checkpointing": build_spec(
            tiny_files, (2, 4, 2), lora=None, training={"learningRate": 0.001, "gradientCheckpointing": True}
        ),
        "2x4x2, full, checkpointing every 2 layers": build_spec(
            tiny_files,
            (2, 4, 2),
            lora=None,
            training={"learningRate": 0.001, "gradientCheckpointing": True, "gradientCheckpointingInterval": 2},
        ),
        "2x4x2, full, bfloat16": build_spec(
            tiny_files, (2, 4, 2), lora=None, torch_dtype="bfloat16", training={"learningRate": 0.001, "maxSteps": 2}
        ),
        "2x4x2, 4 bits": build_spec(
            tiny_files, (2, 4, 2), lora=NF4_LORA, training={"saveSteps": 2, "saveTotalLimit": 9}
        ),
        "2x4x2, 4 bits (from step 2)": build_spec(
            tiny_files, (2, 4, 2), lora=NF4_LORA, training={"saveSteps": 2, "saveTotalLimit": 9}
        ),
        "2x4x2, 4 bits, zero2": build_spec(tiny_files, (2, 4, 2), lora=NF4_LORA, deepspeed={"preset": "zero2"}),
        "2x4x2, 4 bits, dpo": build_spec(tiny_files, (2, 4, 2), lora=NF4_LORA, sft=None, dpo=DPO, row_variant=PAIRS),
        "2x4x2, dpo": build_spec(tiny_files, (2, 4, 2), sft=None, dpo=DPO, row_variant=PAIRS),
        "2x1x8, dpo": build_spec(tiny_files, (2, 1, 8), sft=None, dpo=DPO, row_variant=PAIRS),
        "2x4x2, from the Hub": build_spec(tiny_files, (2, 4, 2), dataset={"train": FROM_HUB, "eval": FROM_HUB}),
        "2x8x1, pushed": build_spec(
            tiny_files,
            (2, 8, 1),
            training={"maxSteps": 1},
            output={"persistentVolumeClaim": {"claimName": "unused"}, "pushToHub": {"repo": "acme/support"}},
        ),
        "2x4x2, weighted": build_spec(tiny_files, (2, 4, 2), row_variant=WEIGHTED),
        "2x2x1, packed": build_spec(tiny_files, (2, 2, 1), dataset=PACKED_DATASET),
        "2x2x1, packed, dropout": build_spec(tiny_files, (2, 2, 1), **RESUMABLE_FIELDS),
        "2x2x1, packed, dropout (from step 2)": build_spec(tiny_files, (2, 2, 1), **RESUMABLE_FIELDS),
        "2x2x1, packed, dropout, probe": build_spec(
            tiny_files, (2, 2, 1), **{**RESUMABLE_FIELDS, "training": {**RESUMABLE_FIELDS["training"], "probe": True}}
        ),
        "2x4x2 (mixed)": build_spec(tiny_files, (2, 4, 2)),
        "2x8x1 (mixed)": build_spec(tiny_files, (2, 8, 1), training={"maxSteps": 1, "allowMixedHardware": True}),
        "auto (in 846 MiB)": build_spec(tiny_files, (2, "auto", None), training={"globalBatchSize": 16}),
        "auto, bfloat16 (at most 7 sequences)": build_spec(
            tiny_files, (2, "auto", None), torch_dtype="bfloat16", training={"globalBatchSize": 16, "maxSteps": 2}
        ),
        "auto, dpo (at most 8 sequences)": build_spec(
            tiny_files, (2, "auto", None), sft=None, dpo=DPO, row_variant=PAIRS, training={"globalBatchSize": 16}
        ),
        "auto, packed, dropout (at most 9 sequences)": build_spec(
            tiny_files,
            (2, "auto", None),
            **{**RESUMABLE_FIELDS, "training": {**RESUMABLE_FIELDS["training"], "globalBatchSize": 4}},
        ),
        "2x4x2, not finite": build_spec(tiny_files, (2, 4, 2), model=broken_model),
    }
    return run_cells(two_rank_folder, cells, ranks=2)


@pytest.fixture(scope="module")
def single_rank_results(tiny_files: tiny_text.TinyFiles, tmp_path_factory: pytest.TempPathFactory) -> Results:
    per_rank_mean = {"averageTokensAcrossDevices": False}
    cells = {
        "1x16x1": build_spec(tiny_files, (1, 16, 1), training={"perDeviceEvalBatchSize": 5}),
        "1x16x1 (again)": build_spec(tiny_files, (1, 16, 1), training={"perDeviceEvalBatchSize": 5}),
        "1x1x16": build_spec(tiny_files, (1, 1, 16)),
        "1x16x1, mean per rank": build_spec(tiny_files, (1, 16, 1), training=per_rank_mean),
        "1x4x1, packed": build_spec(tiny_files, (1, 4, 1), dataset=PACKED_DATASET),
        "1x4x1, packed, eager": build_spec(tiny_files, (1, 4, 1), dataset=PACKED_DATASET, attention="eager"),
        "1x16x1, dpo": build_spec(tiny_files, (1, 16, 1), sft=None, dpo=DPO, row_variant=PAIRS),
        "1x16x1, 4 bits": build_spec(tiny_files, (1, 16, 1), lora=NF4_LORA),
        "1x16x1, weighted": build_spec(tiny_files, (1, 16, 1), row_variant=WEIGHTED),
        "1x16x1, full": build_spec(tiny_files, (1, 16, 1), lora=None, training={"learningRate": 0.001}),
        "1x16x1, sdpa": build_spec(tiny_files, (1, 16, 1), attention="sdpa"),
        "1x16x1, full, sdpa": build_spec(
            tiny_files, (1, 16, 1), attention="sdpa", lora=None, training={"learningRate": 0.001}
        ),
        "1x4x1, packed, sdpa": build_spec(tiny_files, (1, 4, 1), attention="sdpa", dataset=PACKED_DATASET),
        "1x16x1, dpo, sdpa": build_spec(tiny_files, (1, 16, 1), attention="sdpa", sft=None, dpo=DPO, row_variant=PAIRS),
        "1x16x1, weighted, sdpa": build_spec(tiny_files, (1, 16, 1), attention="sdpa", row_variant=WEIGHTED),
    }
    return run_cells(tmp_path_factory.mktemp("one") / "cells", cells, ranks=1)


@pytest.mark.parametrize("metric", ["loss", "grad_norm", "eval_loss"])
def test_metrics_do_not_depend_on_the_batch_layout(
    two_rank_results: Results, single_rank_results: Results, metric: str
) -> None:
    layouts = [
        two_rank_results["2x1x8"],
        two_rank_results["2x4x2"],
        single_rank_results["1x16x1"],
        single_rank_results["1x1x16"],
    ]

    assert len(layouts[0][metric]) == (1 if metric == "eval_loss" else STEPS)
    for layout in layouts[1:]:
        assert layout[metric] == pytest.approx(layouts[0][metric], rel=FOUR_DIGITS)


@pytest.mark.parametrize("cell", ["1x16x1", "1x16x1, full", "1x4x1, packed", "1x16x1, dpo", "1x16x1, weighted"])
def test_metrics_do_not_depend_on_padding(single_rank_results: Results, cell: str) -> None:
    """By default, all sequences of a micro-batch are in one row; sdpa pads them."""
    actual, expected = single_rank_results[cell], single_rank_results[f"{cell}, sdpa"]

    assert actual["loss"][0] == pytest.approx(expected["loss"][0], rel=1e-6)
    for metric in ("loss", "grad_norm", "eval_loss"):
        assert actual[metric] == pytest.approx(expected[metric], rel=FOUR_DIGITS)


def test_full_fine_tuning_does_not_depend_on_the_batch_layout(
    two_rank_results: Results, single_rank_results: Results
) -> None:
    for metric in ("loss", "grad_norm", "eval_loss"):
        assert two_rank_results["2x4x2, full"][metric] == pytest.approx(
            single_rank_results["1x16x1, full"][metric], rel=FOUR_DIGITS
        )


@pytest.mark.parametrize("metric", ["loss", "grad_norm", "rewards/margins", "eval_loss", "eval_rewards/accuracies"])
def test_dpo_does_not_depend_on_the_batch_layout(
    two_rank_results: Results, single_rank_results: Results, metric: str
) -> None:
    for layout in ("2x4x2, dpo", "2x1x8, dpo"):
        assert two_rank_results[layout][metric] == pytest.approx(
            single_rank_results["1x16x1, dpo"][metric], rel=FOUR_DIGITS, abs=1e-6
        )
    assert single_rank_results["1x16x1, dpo"]["loss"][-1] < single_rank_results["1x16x1, dpo"]["loss"][0] - 0.01


@pytest.mark.parametrize("metric", ["loss", "grad_norm", "eval_loss"])
def test_effect_of_message_weights_does_not_depend_on_the_batch_layout(
    two_rank_results: Results, single_rank_results: Results, metric: str
) -> None:
    assert two_rank_results["2x4x2, weighted"][metric] == pytest.approx(
        single_rank_results["1x16x1, weighted"][metric], rel=FOUR_DIGITS
    )
    assert two_rank_results["2x4x2, weighted"][metric] != pytest.approx(
        two_rank_results["2x4x2"][metric], rel=FOUR_DIGITS
    )


@pytest.mark.parametrize("metric", ["loss", "grad_norm", "eval_loss"])
def test_packed_training_does_not_depend_on_the_batch_layout(
    two_rank_results: Results, single_rank_results: Results, metric: str
) -> None:
    assert two_rank_results["2x2x1, packed"][metric] == pytest.approx(
        single_rank_results["1x4x1, packed"][metric], rel=FOUR_DIGITS
    )


@pytest.mark.parametrize("metric", ["loss", "grad_norm", "eval_loss"])
def test_qlora_does_not_depend_on_the_batch_layout(
    two_rank_results: Results, single_rank_results: Results, metric: str
) -> None:
    for layout in ("2x4x2, 4 bits", "2x4x2, 4 bits, zero2"):
        assert two_rank_results[layout][metric] == pytest.approx(
            single_rank_results["1x16x1, 4 bits"][metric], rel=FOUR_DIGITS
        ), layout
    unquantized = two_rank_results["2x4x2"]
    assert two_rank_results["2x4x2, 4 bits"][metric] != pytest.approx(unquantized[metric], rel=FOUR_DIGITS), (
        "not quantized"
    )
    assert two_rank_results["2x4x2, 4 bits"][metric] == pytest.approx(unquantized[metric], rel=0.2)


def test_resumed_qlora_equals_an_uninterrupted_run(two_rank_results: Results) -> None:
    assert two_rank_results["2x4x2, 4 bits (from step 2)"] == two_rank_results["2x4x2, 4 bits"]


def test_qlora_dpo_uses_the_quantized_model_as_reference(two_rank_results: Results) -> None:
    """The reference model is the quantized model without adapters, so rewards are 0 before the first step."""
    metrics = two_rank_results["2x4x2, 4 bits, dpo"]

    assert metrics["rewards/margins"][0] == pytest.approx(0, abs=1e-6)
    assert metrics["rewards/margins"][-1] > 0.01


@pytest.mark.parametrize("metric", ["loss", "grad_norm", "eval_loss"])
def test_attention_backends_differ_only_by_rounding(single_rank_results: Results, metric: str) -> None:
    sdpa, eager = single_rank_results["1x4x1, packed"], single_rank_results["1x4x1, packed, eager"]

    assert eager[metric] == pytest.approx(sdpa[metric], rel=FOUR_DIGITS)
    assert eager["weights"] != sdpa["weights"], "both runs used the same backend"


def test_packed_training_resumed_within_an_epoch_equals_an_uninterrupted_run(two_rank_results: Results) -> None:
    uninterrupted, resumed = (
        two_rank_results["2x2x1, packed, dropout"],
        two_rank_results["2x2x1, packed, dropout (from step 2)"],
    )

    assert resumed == uninterrupted
    assert uninterrupted["loss"] != two_rank_results["2x2x1, packed"]["loss"], "dropout had no effect"


def test_preflight_does_not_change_the_result(two_rank_results: Results) -> None:
    assert two_rank_results["2x2x1, packed, dropout, probe"] == two_rank_results["2x2x1, packed, dropout"]


@pytest.mark.parametrize(
    ("auto_run", "explicit_run"),
    [
        pytest.param("auto (in 846 MiB)", "2x4x2", id="by forecast"),
        pytest.param("auto, bfloat16 (at most 7 sequences)", "2x4x2, bfloat16", id="by trial"),
        pytest.param("auto, dpo (at most 8 sequences)", "2x4x2, dpo", id="by trial, dpo"),
        pytest.param(
            "auto, packed, dropout (at most 9 sequences)", "2x2x1, packed, dropout", id="by trial, all sizes fit"
        ),
    ],
)
def test_auto_batch_size_equals_the_largest_size_that_fits(
    two_rank_results: Results, auto_run: str, explicit_run: str
) -> None:
    assert two_rank_results[auto_run] == two_rank_results[explicit_run]


@pytest.mark.parametrize("metric", ["loss", "grad_norm"])
def test_mean_loss_per_rank_depends_on_the_batch_layout(
    two_rank_results: Results, single_rank_results: Results, metric: str
) -> None:
    """Without averageTokensAcrossDevices, tokens on ranks with few target tokens have more weight."""
    two, one = two_rank_results["2x8x1, mean per rank"][metric], single_rank_results["1x16x1, mean per rank"][metric]

    assert max(abs(left / right - 1) for left, right in zip(two, one, strict=True)) > 10 * FOUR_DIGITS
    assert one == pytest.approx(
        single_rank_results["1x16x1"][metric], rel=FOUR_DIGITS
    )  # both means are equal with one rank


def test_data_loader_processes_do_not_change_the_result(two_rank_results: Results) -> None:
    assert two_rank_results["2x4x2, loader processes"] == two_rank_results["2x4x2"]


def test_bfloat16_losses_differ_by_at_most_one_percent(two_rank_results: Results) -> None:
    assert two_rank_results["2x4x2, bfloat16"]["loss"] == pytest.approx(two_rank_results["2x4x2"]["loss"][:2], rel=0.01)
    assert two_rank_results["2x4x2, bfloat16"]["loss"] != pytest.approx(two_rank_results["2x4x2"]["loss"][:2], rel=1e-6)


def test_restart_after_the_last_step_only_publishes_the_result(single_rank_results: Results) -> None:
    assert single_rank_results["1x16x1 (again)"] == single_rank_results["1x16x1"]


@pytest.mark.parametrize("layers", ["", " every 2 layers"])
def test_gradient_checkpointing_does_not_change_the_loss(two_rank_results: Results, layers: str) -> None:
    assert two_rank_results[f"2x4x2, full, checkpointing{layers}"]["loss"] == pytest.approx(
        two_rank_results["2x4x2, full"]["loss"], rel=FOUR_DIGITS
    )


def test_fully_trained_model_loads_in_transformers_with_the_requested_dtype(
    two_rank_results: Results, two_rank_folder: Path, tiny_files: tiny_text.TinyFiles
) -> None:
    assert len(two_rank_results["2x4x2, full, bfloat16"]["loss"]) == 2
    trained = AutoModelForCausalLM.from_pretrained(two_rank_folder / "2x4x2, full, bfloat16" / "result")
    base = AutoModelForCausalLM.from_pretrained(tiny_files.model)

    assert trained.dtype is torch.bfloat16
    assert not torch.equal(trained.lm_head.weight, base.lm_head.weight.bfloat16())
    assert trained.lm_head.weight is trained.model.embed_tokens.weight


def test_trained_adapter_can_be_loaded_in_peft(
    two_rank_results: Results, two_rank_folder: Path, tiny_files: tiny_text.TinyFiles
) -> None:
    base = AutoModelForCausalLM.from_pretrained(tiny_files.model)

    adapted = PeftModel.from_pretrained(base, str(two_rank_folder / "2x4x2" / "result"))

    lora_b = {name: weight for name, weight in adapted.named_parameters() if "lora_B" in name}
    assert len(lora_b) == 14  # 7 linear layers in each of 2 blocks
    assert all(weight.abs().sum() > 0 for weight in lora_b.values())
    assert two_rank_results["2x4x2"]["loss"][-1] < two_rank_results["2x4x2"]["loss"][0] - 0.1


def test_nan_loss_fails_the_job_before_a_checkpoint_is_saved(two_rank_results: Results, two_rank_folder: Path) -> None:
    assert two_rank_results["2x4x2, not finite"]["error"] == "NonFiniteLoss"
    assert "at step 1;" in two_rank_results["2x4x2, not finite"]["message"]
    assert list((two_rank_folder / "2x4x2, not finite" / "checkpoints").iterdir()) == []


def test_mixed_hardware_is_rejected_before_output_is_written_unless_allowed(
    two_rank_results: Results, two_rank_folder: Path
) -> None:
    assert two_rank_results["2x4x2 (mixed)"]["error"] == "MixedHardware"
    assert "NVIDIA L4 on node 0 rank 1." in two_rank_results["2x4x2 (mixed)"]["message"]
    assert not (two_rank_folder / "2x4x2 (mixed)" / "checkpoints").exists()
    assert len(two_rank_results["2x8x1 (mixed)"]["loss"]) == 1


def test_rows_from_the_hub_and_from_a_volume_give_equal_results(two_rank_results: Results) -> None:
    assert two_rank_results["2x4x2, from the Hub"] == two_rank_results["2x4x2"]


def test_pushed_repository_contains_the_result(two_rank_results: Results, two_rank_folder: Path, hub: FakeHub) -> None:
    assert len(two_rank_results["2x8x1, pushed"]["loss"]) == 1
    result = two_rank_folder / "2x8x1, pushed" / "result"
    files = {str(file.relative_to(result)): file.read_bytes() for file in result.rglob("*") if file.is_file()}
    del files["SUCCESS"]  # SUCCESS is written after the push
    assert hub.repositories["acme/support"] == files
    assert hub.visibility == {"acme/support": "private"}
