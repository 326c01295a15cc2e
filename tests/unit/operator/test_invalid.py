"""How a spec that cannot be read is explained."""

from typing import Any

import pytest
from pydantic import ValidationError

from finetune_api.v1alpha1 import FineTuneJob
from finetune_operator.invalid import explain, explain_each
from support.builders import spec


def refusal(**fields: Any) -> ValidationError:
    with pytest.raises(ValidationError) as refused:
        FineTuneJob.parse({"metadata": {"name": "bert"}, "spec": spec(**fields)})
    return refused.value


def test_fields_are_written_as_in_the_file() -> None:
    error = refusal(numNodes=0, trainign={}, dataset={"train": [{"name": "a"}, {}]})

    assert set(explain_each(error)) == {
        "spec.dataset.train[1].name: is required",
        "spec.numNodes: Input should be greater than or equal to 1",
        "spec.trainign: unknown field",
    }
    assert explain(error) == "; ".join(explain_each(error))


def test_a_list_with_a_wrong_item_is_not_called_empty() -> None:
    assert explain(refusal(dataset={"train": [{}]})) == "spec.dataset.train[0].name: is required"
    assert explain(refusal(dataset={"train": []})) == "spec.dataset.train: List should have at least 1 item"
