from typing import Any

import pytest

from finetune_api.batch import Batch
from finetune_api.learning_rates import Rates, resolve_rates
from testing.builders.jobs import job

BATCH = Batch(2, 8, 4)  # 64
GIVEN = {"learningRate": 0.001, "visionLearningRate": 0.0002, "alignerLearningRate": 0.01}
TRAINED = {"name": "m", "freeze": []}


def rates(**fields: Any) -> Rates:
    return resolve_rates(job(**fields).spec, BATCH)


def test_the_usual_rate_depends_on_method_and_on_how_much_is_trained() -> None:
    assert rates(lora=None).usual == 1e-5
    assert rates().usual == 1e-4
    assert rates(sft=None, dpo={}).usual == pytest.approx(1e-5)
    assert rates(training={"learningRate": 0.5}).usual == 0.5


def test_parts_without_a_rate_of_their_own_learn_at_the_usual_one() -> None:
    found = rates(model=TRAINED, training={"learningRate": 0.001, "visionLearningRate": 0.0002})

    assert [found.of(part) for part in ("language", "vision", "aligner")] == [0.001, 0.0002, 0.001]
    assert str(found) == "0.001, vision 0.0002"


@pytest.mark.parametrize(("rule", "factor"), [("linear", 4.0), ("sqrt", 2.0)])
def test_every_rate_is_scaled_from_the_batch_that_it_suits(rule: str, factor: float) -> None:
    scaling = {"rule": rule, "baseBatchSize": 16}

    found = rates(model=TRAINED, training={**GIVEN, "lrScaling": scaling})

    expected = [0.001 * factor, 0.0002 * factor, 0.01 * factor]
    assert [found.of(part) for part in ("language", "vision", "aligner")] == pytest.approx(expected)


def test_a_scaled_rate_says_how() -> None:
    found = rates(training={"learningRate": 0.001, "lrScaling": {"rule": "sqrt", "baseBatchSize": 16}})

    assert str(found) == "0.002 (2 = sqrt(64 / 16) times what is given)"
