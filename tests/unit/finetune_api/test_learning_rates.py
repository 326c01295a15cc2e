"""Tests of learning rates: defaults, separate rates for model parts, and scaling to the effective batch."""

from typing import Any

import pytest

from finetune_api.batch import Batch
from finetune_api.learning_rates import LearningRates, resolve_learning_rates
from testing.builders.jobs import job

BATCH = Batch(2, 8, 4)  # effective batch: 64
SEPARATE_RATES = {"learningRate": 0.001, "visionLearningRate": 0.0002, "alignerLearningRate": 0.01}
UNFROZEN_MODEL = {"name": "m", "freeze": []}


def resolve_rates(**fields: Any) -> LearningRates:
    return resolve_learning_rates(job(**fields).spec, BATCH)


def test_default_rate_depends_on_method_and_lora() -> None:
    assert resolve_rates(lora=None).default_rate == 1e-5
    assert resolve_rates().default_rate == 1e-4
    assert resolve_rates(sft=None, dpo={}).default_rate == pytest.approx(1e-5)
    assert resolve_rates(training={"learningRate": 0.5}).default_rate == 0.5


def test_model_parts_without_a_separate_rate_use_the_default_rate() -> None:
    resolved = resolve_rates(model=UNFROZEN_MODEL, training={"learningRate": 0.001, "visionLearningRate": 0.0002})

    assert [resolved.get_rate(part) for part in ("language", "vision", "aligner")] == [0.001, 0.0002, 0.001]
    assert str(resolved) == "0.001, vision 0.0002"


@pytest.mark.parametrize(("rule", "factor"), [("linear", 4.0), ("sqrt", 2.0)])
def test_all_rates_are_scaled_to_the_effective_batch(rule: str, factor: float) -> None:
    scaling = {"rule": rule, "baseBatchSize": 16}

    resolved = resolve_rates(model=UNFROZEN_MODEL, training={**SEPARATE_RATES, "lrScaling": scaling})

    expected = [0.001 * factor, 0.0002 * factor, 0.01 * factor]
    assert [resolved.get_rate(part) for part in ("language", "vision", "aligner")] == pytest.approx(expected)


def test_scaled_rate_is_printed_with_its_factor() -> None:
    resolved = resolve_rates(training={"learningRate": 0.001, "lrScaling": {"rule": "sqrt", "baseBatchSize": 16}})

    assert str(resolved) == "0.002 (2 = sqrt(64 / 16) times the rates of the spec)"
