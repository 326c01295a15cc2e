"""Tests that every cross-field rule has a CEL rule and an example job that violates it."""

from typing import Any

import pytest
from pydantic import ValidationError

from finetune_api.v1alpha1.base import CrossFieldRule, ModelWithRules
from finetune_api.v1alpha1.job import FineTuneJobSpec
from testing.builders.bad_jobs import BAD_JOBS
from testing.builders.jobs import spec

ModelRule = tuple[type[ModelWithRules], CrossFieldRule[Any]]
RULES: dict[str, ModelRule] = {
    f"{model.__name__}: {rule.name}": (model, rule) for model in ModelWithRules.__subclasses__() for rule in model.rules
}


def is_valid(fields: dict[str, Any]) -> bool:
    """Return whether the models accept the base spec with these fields; a value of None removes the field."""
    try:
        FineTuneJobSpec.model_validate({name: value for name, value in spec(**fields).items() if value is not None})
    except ValidationError:
        return False
    return True


def test_rules_have_unique_names() -> None:
    assert {"FineTuneJobSpec: one method", "Dataset: one evaluation"} <= set(RULES)
    assert len(RULES) == sum(len(model.rules) for model in ModelWithRules.__subclasses__())


@pytest.mark.parametrize("name", RULES)
def test_every_rule_has_cel_rules_or_an_explanation(name: str) -> None:
    _, rule = RULES[name]

    assert rule.cel_rules or rule.cel_limitations


@pytest.mark.parametrize("name", [name for name, (_, rule) in RULES.items() if rule.check is not None])
def test_removing_a_rule_makes_a_bad_job_valid(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, rule = RULES[name]
    monkeypatch.setattr(model, "rules", tuple(other for other in model.rules if other is not rule))

    assert any(is_valid(case.fields) for case in BAD_JOBS.values()), "add a case to testing/builders/bad_jobs.py"


@pytest.mark.parametrize("name", RULES)
def test_every_cel_message_is_expected_by_a_bad_job(name: str) -> None:
    errors = [case.api_server_error for case in BAD_JOBS.values() if case.api_server_error is not None]
    # only the API server evaluates message expressions
    messages = [cel_rule.message for cel_rule in RULES[name][1].cel_rules if cel_rule.message_expression is None]

    assert [message for message in messages if not any(error in message for error in errors)] == []
