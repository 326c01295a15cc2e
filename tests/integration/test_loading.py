"""Tests that only rank 0 loads the weights of a model that FSDP2 shards."""

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from testing.models import tiny_families, tiny_text
from testing.processes.launches import run_script

pytestmark = pytest.mark.slow

RANKS = 2
MEGABYTE = 10**6
WEIGHTS = "model.safetensors"


def save_large_model(folder: Path, *, tied: bool) -> None:
    """Save a model whose weights, most of them in embeddings, are 16-bit values on disk and 250 MB in float32.

    Without the conversion, weights would stay in the page cache.
    """
    tiny_text.build_tokenizer().save_pretrained(folder)
    tiny_text.save_bfloat16_model(
        folder, vocab_size=120_000, hidden_size=256, intermediate_size=1024, layers=2, tied=tied
    )


def add_output_weight(file: Path) -> None:
    """Add an output weight that differs from the input embedding, although the config ties them."""
    weights = load_file(file)
    save_file({**weights, "lm_head.weight": weights["model.embed_tokens.weight"] + 1}, file, {"format": "pt"})


@pytest.fixture(scope="module")
def results_by_rank(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Load all models on two ranks; return the results of each rank by model."""
    folder = tmp_path_factory.mktemp("models")
    for name in ("untied", "tied", "tied by config only", "damaged"):
        save_large_model(folder / name, tied=name != "untied")
    add_output_weight(folder / "tied by config only" / WEIGHTS)
    (folder / "damaged" / WEIGHTS).write_bytes(b"damaged")
    tiny_families.build(folder / "glm4_moe", "glm4_moe")
    return run_script("measure_loading.py", folder, ranks=RANKS)


def test_weights_are_in_the_host_memory_of_rank_zero_only(results_by_rank: list[dict[str, Any]]) -> None:
    first, second = (results["untied"] for results in results_by_rank)

    assert first["weight_bytes"] == second["weight_bytes"] > 240 * MEGABYTE
    assert first["added_bytes"] > 0.8 * first["weight_bytes"]  # memory from before may be freed meanwhile
    assert second["added_bytes"] < 0.1 * second["weight_bytes"]


def test_all_ranks_have_the_buffers_of_rank_zero(results_by_rank: list[dict[str, Any]]) -> None:
    first, second = (results["glm4_moe"]["buffers"] for results in results_by_rank)

    assert second == first
    assert any(name.endswith("e_score_correction_bias") and total > 0 for name, total in first.items())


@pytest.mark.parametrize(("model", "is_tied"), [("tied", True), ("untied", False), ("tied by config only", False)])
def test_embeddings_are_tied_on_all_ranks_or_on_none(
    results_by_rank: list[dict[str, Any]], model: str, is_tied: bool
) -> None:
    assert [results[model]["is_tied"] for results in results_by_rank] == [is_tied] * RANKS


def test_an_error_of_rank_zero_is_raised_on_every_rank(results_by_rank: list[dict[str, Any]]) -> None:
    first, second = (results["damaged"] for results in results_by_rank)

    assert second == first
    assert first["error"].startswith("ModelError: model")
