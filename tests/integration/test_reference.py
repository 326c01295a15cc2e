"""Tests that trainings equal their definition (`testing.reference`) in every step, and their results in every logit."""

from dataclasses import fields
from typing import Any

import pytest

from testing.reference.__main__ import check_all, prepare
from testing.reference.combination import RULES, SIMPLEST, Combination, Layout, draw, is_valid
from testing.reference.compare import Report, check, find_largest
from testing.reference.launch import run_trainer

pytestmark = pytest.mark.slow

ONE, PADDED, WIDE = Layout(1, 1, 4), Layout(1, 4, 1), Layout(1, 2, 2)
QUANTITIES = {"loss", "grad_norm", "learning_rate", "epoch", "logits"}
DPO: dict[str, Any] = {"method": "dpo", "layout": Layout(1, 2, 2)}


def two(preset: str, micro_batch: int = 1, accumulation: int = 2) -> Layout:
    return Layout(2, micro_batch, accumulation, preset)


COMBINATIONS: dict[str, Combination] = {
    # SFT in one process: rows, masks, losses, schedules
    "full": Combination(layout=WIDE, steps=4, schedule="cosine", warmup=1),
    "two epochs, short last step": Combination(family="qwen2", rows=6, layout=PADDED, epochs=2.0, schedule="linear"),
    "last turn": Combination(family="qwen3", dialect="instruct", loss_on="lastTurn", layout=WIDE, decay=0.5),
    "all tokens": Combination(family="mistral", dialect="roles", loss_on="all", layout=PADDED, max_norm=0.3),
    "weights": Combination(weighted=True, layout=WIDE, max_norm=0.0, beta2=0.95),
    "plain text": Combination(
        family="phi3", dialect="text", split_words=True, layout=PADDED, schedule="polynomial", warmup=3, steps=3
    ),
    "truncated": Combination(family="granite", max_length=60, overlong="truncate", layout=WIDE, attention="eager"),
    "dropped": Combination(family="cohere", max_length=60, rows=14, layout=WIDE, attention="sdpa"),
    "packed": Combination(packing=True, max_length=150, rows=14, layout=Layout(1, 1, 2), decay=0.1),
    "packed and padded": Combination(packing=True, max_length=150, rows=14, layout=Layout(1, 2, 1), attention="eager"),
    "switching rope": Combination(family="longrope", rows=14, layout=PADDED, max_length=90),
    "packed windows": Combination(family="gemma2", packing=True, max_length=150, rows=14, layout=Layout(1, 1, 2)),
    "mixture": Combination(draws=(12, 3), rows=8, layout=WIDE, epochs=1.0, scaling="linear"),
    "checkpointing": Combination(
        family="gpt2",
        checkpointing=True,
        scaling="sqrt",
        schedule="constant_with_warmup",
        warmup=2,
        layout=WIDE,
        steps=3,
    ),
    "experts": Combination(family="qwen3_moe", layout=WIDE),
    "router loss": Combination(family="mixtral", router_coefficient=1.0, layout=PADDED, epsilon=1e-4, rows=6),
    "router loss of packs": Combination(
        family="qwen3_moe", router_coefficient=1.0, packing=True, max_length=90, layout=PADDED, attention="sdpa"
    ),
    "sinks": Combination(family="gpt_oss", layout=PADDED),
    # adapters
    "lora, merged": Combination(tuner="lora", merge=True, layout=WIDE, steps=3),
    "rslora": Combination(family="qwen2", tuner="lora", rslora=True, rank=16, layout=PADDED, merge=True),
    "dora": Combination(tuner="lora", dora=True, alpha=32, layout=WIDE, merge=True, decay=0.1),
    "targets": Combination(tuner="lora", targets=("q_proj", "lm_head"), layout=WIDE, merge=True),
    "lora in bfloat16": Combination(tuner="lora", dtype="bfloat16", layout=WIDE, evaluation="none"),
    # DPO
    "dpo": Combination(**DPO, steps=3),
    "dpo in bfloat16": Combination(**DPO, dtype="bfloat16"),
    "dpo, lora": Combination(**DPO, family="qwen2", tuner="lora", steps=3, evaluation="split", rows=12),
    "dpo, continued, sft term": Combination(
        **DPO, family="gemma2", tuner="adapter", saves_modules=True, rpo_alpha=0.5, dialect="instruct"
    ),
    "dpo, continued biases": Combination(**DPO, family="granite", tuner="adapter", trains_biases=True, merge=True),
    "ipo": Combination(**DPO, family="qwen3", loss_type="ipo", beta=0.3, max_length=60, overlong="truncate"),
    "hinge": Combination(**DPO, loss_type="hinge", tuner="lora", dialect="text", split_words=True, precompute=True),
    "robust": Combination(**DPO, family="cohere", loss_type="robust", precompute=True, attention="sdpa"),
    # two ranks
    "two ranks": Combination(family="qwen2", layout=two("ddp"), rows=7, steps=3, schedule="linear"),
    "mean per rank": Combination(layout=two("ddp", 2, 1), rows=10, mean_per_rank=True),
    "fsdp": Combination(family="qwen2", layout=two("fsdp"), rows=7, steps=3, decay=0.1, max_norm=0.3),
    "router loss of packs, fsdp": Combination(
        family="mixtral",
        router_coefficient=1.0,
        packing=True,
        max_length=90,
        layout=two("fsdp", 2, 1),
        attention="eager",
        rows=14,
    ),
    "tied output layer, fsdp": Combination(
        family="cohere", layout=two("fsdp"), tuner="lora", targets=("q_proj", "lm_head")
    ),
    "zero1": Combination(layout=two("zero1", 2, 1), weighted=True, max_norm=0.3),
    "zero1 in bfloat16": Combination(layout=two("zero1", 1, 4), dtype="bfloat16", tuner="lora", evaluation="none"),
    "zero2": Combination(layout=two("zero2"), rows=7, schedule="polynomial", packing=True, max_length=150),
    "zero3": Combination(family="qwen3", layout=two("zero3"), tuner="lora", merge=True, max_norm=0.3),
    "biases, zero3": Combination(
        family="granite", layout=two("zero3"), tuner="adapter", trains_biases=True, merge=True
    ),
    "dpo, fsdp": Combination(method="dpo", layout=two("fsdp"), rpo_alpha=0.5, rows=7),
    "dpo, zero3": Combination(method="dpo", family="qwen2", layout=two("zero3", 2, 1), loss_type="ipo"),
    # resumed in another layout
    "resumed in two ranks": Combination(layout=WIDE, resume=two("zero2"), steps=3, schedule="cosine"),
    "resumed within an epoch": Combination(
        rows=13, layout=ONE, resume=two("fsdp", 2, 1), steps=4, resume_after=2, warmup=2, schedule="linear"
    ),
    "resumed lora": Combination(tuner="lora", layout=two("zero3"), resume=two("ddp"), steps=3, merge=True),
}


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Report]:
    prepare()
    runs = run_trainer(COMBINATIONS, tmp_path_factory.mktemp("reference"))
    return {name: check(run) for name, run in runs.items()}


@pytest.mark.parametrize("name", COMBINATIONS)
def test_training_equals_its_definition(reports: dict[str, Report], name: str) -> None:
    assert reports[name].differences == []
    assert {each.quantity for each in reports[name].comparisons} >= QUANTITIES


def test_losses_and_logits_are_within_rounding(reports: dict[str, Report]) -> None:
    """Most values agree more closely than the bounds, which allow for losses near 0 and small gradients."""
    exact = [report for name, report in reports.items() if COMBINATIONS[name].dtype == "float32"]

    assert find_largest(exact)["learning_rate"] < 1e-14
    assert find_largest(exact)["logits"] < 2e-5


def test_the_combinations_cover_every_option() -> None:
    for field in fields(Combination):
        if field.name != "seed":
            assert any(getattr(each, field.name) != getattr(SIMPLEST, field.name) for each in COMBINATIONS.values()), (
                field
            )


@pytest.mark.parametrize("name", COMBINATIONS)
def test_combinations_are_valid(name: str) -> None:
    assert is_valid(COMBINATIONS[name]), [names for names, is_kept in RULES.items() if not is_kept(COMBINATIONS[name])]


@pytest.mark.long("random combinations of the options that the fixed ones cover")
def test_random_combinations_equal_their_definition() -> None:
    prepare()
    reports = check_all([draw(seed) for seed in range(1000, 1072)])
    assert {report.options.seed: report.differences for report in reports if report.differences} == {}
