"""Tests that the table of free strings is complete, and that it leaves out only harmless strings."""

import pytest

from finetune_api.v1alpha1.name_types import JOB_NAME_PATTERN, LABEL_PATTERN, SUBDOMAIN_PATTERN
from free_strings import find_problems, get_spec_schema, is_harmless, list_free_strings, read_destinations

FREE = {"type": "string", "maxLength": 64}
STRINGS = list_free_strings(get_spec_schema())


def test_every_free_string_of_the_crd_has_one_destination() -> None:
    assert len(STRINGS) > 140
    assert find_problems(STRINGS, read_destinations()) == []


@pytest.mark.parametrize(
    ("field", "path"),
    [
        (FREE, "planted"),
        ({"type": "array", "items": FREE}, "planted[]"),
        ({"type": "object", "properties": {"name": FREE}}, "planted.name"),
        ({"type": "object", "additionalProperties": {"type": "integer"}}, "planted{key}"),
        ({"type": "object", "x-kubernetes-preserve-unknown-fields": True}, "planted"),
        ({"x-kubernetes-int-or-string": True}, "planted"),
        ({"type": "string", "pattern": "^/[^:]*$"}, "planted"),
    ],
    ids=["string", "list", "object", "key of a map", "without a schema", "integer or string", "path"],
)
def test_a_new_free_string_without_destination_is_a_problem(field: dict[str, object], path: str) -> None:
    schema = {"properties": {**get_spec_schema()["properties"], "planted": field}}

    assert find_problems(list_free_strings(schema), read_destinations()) == [
        f"free_strings.yaml: {path}: state once where this free string ends; found []"
    ]


def test_a_destination_without_a_string_or_a_second_one_is_a_problem() -> None:
    problems = find_problems(STRINGS, [*read_destinations(), "podTemplate.removed", "imag*"])

    assert problems == [
        "free_strings.yaml: image: state once where this free string ends; found ['image', 'imag*']",
        "free_strings.yaml: podTemplate.removed: the schema has no such free string; remove it",
    ]


@pytest.mark.parametrize("pattern", [LABEL_PATTERN, SUBDOMAIN_PATTERN, JOB_NAME_PATTERN, "^auto$", "^[A-Za-z0-9_]+$"])
def test_a_pattern_of_names_is_harmless(pattern: str) -> None:
    assert is_harmless(pattern)


@pytest.mark.parametrize("pattern", ["", "^[a-z.]+$", "^[a-z/]+[.]*$", "^[^/]+$", "[a-z]", "^[a-z ]+$", "^a[^b]a$"])
def test_a_pattern_that_permits_special_characters_is_not_harmless(pattern: str) -> None:
    assert not is_harmless(pattern)
