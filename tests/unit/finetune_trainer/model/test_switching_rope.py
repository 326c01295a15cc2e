"""Tests for rotary embeddings that depend on the longest row of a forward pass."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, Phi3Config, PretrainedConfig

from finetune_api.batch import Batch
from finetune_trainer.data.batch_sampler import BatchSampler
from finetune_trainer.data.collator import Collator, SequenceLayout
from finetune_trainer.data.epoch_order import ItemOrder, RowOrder
from finetune_trainer.data.packing import PackOrder
from finetune_trainer.model.switching_rope import find_switching_rope
from finetune_trainer.model.varlen_attention import VARLEN  # registers the implementation
from finetune_trainer.startup_log import describe_switching_rope
from finetune_trainer.training.token_losses import compute_target_losses
from testing.models import attention_families

LIMIT = 8
SIZES = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "pad_token_id": 0}
LENGTHS = np.array([11, 10, 9, 7, 6, 5, 12, 4])


def build_longrope_config() -> PretrainedConfig:
    factors: dict[str, Any] = {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
    sizes = {**SIZES, "max_position_embeddings": 32, "original_max_position_embeddings": LIMIT}
    return Phi3Config(**sizes, rope_parameters={"rope_type": "longrope", **factors}, initializer_range=0.3)


def build_dynamic_config() -> PretrainedConfig:
    return LlamaConfig(**SIZES, max_position_embeddings=LIMIT, rope_parameters={"rope_type": "dynamic", "factor": 2.0})


def describe(config: PretrainedConfig, order: ItemOrder, batch: Batch) -> list[str]:
    data: Any = SimpleNamespace(order=order, train=SimpleNamespace(lengths=LENGTHS, __len__=None))
    data.train = type("Rows", (), {"lengths": LENGTHS, "__len__": lambda _: len(LENGTHS)})()
    return [f"{subject}: {note}" for subject, note in describe_switching_rope(data, batch, config)]


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        pytest.param(build_longrope_config(), ("longrope", LIMIT, False), id="longrope"),
        pytest.param(build_dynamic_config(), ("dynamic", LIMIT, True), id="dynamic"),
    ],
)
def test_switching_rope_is_found(config: PretrainedConfig, expected: tuple[str, int, bool]) -> None:
    rope = find_switching_rope(config)

    assert rope is not None
    assert (*rope, rope.is_dynamic) == expected


@pytest.mark.parametrize("family", attention_families.CONFIGS)
def test_other_rope_is_independent_of_the_micro_batch(family: str) -> None:
    assert find_switching_rope(attention_families.CONFIGS[family]()) is None


@pytest.mark.parametrize("padding_free", [False, True])
def test_losses_with_longrope_do_not_depend_on_micro_batches_that_are_not_mixed(*, padding_free: bool) -> None:
    model = attention_families.build_model(
        build_longrope_config(), attn_implementation=VARLEN if padding_free else "sdpa"
    )
    collate = Collator(0, SequenceLayout(padding_free=padding_free))
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(3, 64, (int(length),), generator=generator) for length in LENGTHS]

    def sum_losses(batch: Batch, length_limit: int | None) -> float:
        sampler = BatchSampler(RowOrder(LENGTHS[:5], seed=1, length_limit=length_limit), batch, rank=0)
        micro_batches = [collate([({"input_ids": rows[i], "labels": rows[i]},) for i in items]) for items in sampler]  # type: ignore[index]
        with torch.no_grad():
            return sum(float(compute_target_losses(model, micro_batch).sum()) for micro_batch in micro_batches)

    expected = sum_losses(Batch(1, 6, 1), LIMIT)

    assert sum_losses(Batch(2, 3, 1), LIMIT) == pytest.approx(expected, rel=1e-5)
    assert sum_losses(Batch(2, 3, 1), None) != pytest.approx(expected, rel=1e-4), "a micro-batch is mixed"


@pytest.mark.parametrize(
    ("rows", "batch", "count"),
    [
        pytest.param(8, Batch(4, 2, 1), 0, id="rows of each side fill micro-batches"),
        pytest.param(8, Batch(8, 1, 1), 4, id="one micro-batch"),
        pytest.param(8, Batch(3, 3, 1), 2, id="another round would be necessary"),
        pytest.param(5, Batch(2, 3, 1), 0, id="places stay empty"),
    ],
)
def test_rows_that_share_micro_batches_with_longer_ones_are_counted(rows: int, batch: Batch, count: int) -> None:
    order = RowOrder(LENGTHS[:rows], seed=1, length_limit=LIMIT)

    lines = describe(build_longrope_config(), order, batch)

    assert len(lines) == bool(count)
    assert all(line.startswith("rope: longrope: 4 of 8 rows have more than 8 tokens") for line in lines)
    assert all(f"these contain {count} of 8 rows with fewer tokens" in line for line in lines)


def test_dynamic_rope_is_reported_if_a_row_is_longer() -> None:
    longer, shorter = (PackOrder(LENGTHS, max_length=16, seed=1, length_limit=limit) for limit in (LIMIT, 16))

    (line,) = describe(build_dynamic_config(), longer, Batch(1, 2, 1))

    assert "rope: dynamic: 4 of 8 rows have more than 8 tokens" in line
    assert "these contain 0 of 6 packs" in line
    assert line.endswith("depend on earlier micro-batches, which a resumed run does not repeat")
    config = build_dynamic_config()
    config.max_position_embeddings = 16
    assert describe(config, shorter, Batch(1, 2, 1)) == []
