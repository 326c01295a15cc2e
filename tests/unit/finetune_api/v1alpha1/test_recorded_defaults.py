"""Tests that recorded defaults are constants, and that they apply only to fields that the user did not set."""

import json
from typing import Any

import pytest

from finetune_api.v1alpha1.job import FineTuneJob, FineTuneJobSpec
from finetune_api.v1alpha1.recorded_defaults import apply_defaults, render_defaults
from testing.builders.jobs import spec


def parse_spec(**fields: Any) -> FineTuneJobSpec:
    return FineTuneJobSpec.model_validate(spec(**fields))


def change_defaults(*path: str, value: object) -> str:
    defaults = json.loads(render_defaults(FineTuneJobSpec))
    section = defaults
    for name in path[:-1]:
        section = section.setdefault(name, {})
    section[path[-1]] = value
    return json.dumps(defaults)


def test_defaults_are_nested_constants_of_all_fields() -> None:
    defaults = json.loads(render_defaults(FineTuneJobSpec))

    assert defaults["numNodes"] == 1
    assert defaults["lora"]["r"] == 8
    assert defaults["output"]["pushToHub"]["private"] is True
    assert "shmSize" not in defaults  # computed from the memory limit
    assert "volumes" not in defaults
    assert len(render_defaults(FineTuneJobSpec)) < 2000  # bytes in every status


def test_defaults_of_the_same_release_return_the_same_spec() -> None:
    parsed = parse_spec()

    assert apply_defaults(parsed, render_defaults(FineTuneJobSpec)) is parsed


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("startupDeadlineSeconds",), 60),
        (("training", "loggingSteps"), 7),
        (("lora", "r"), 4),
        (("restartPolicy", "maxRestarts"), 0),
    ],
)
def test_unset_fields_get_the_recorded_default(path: tuple[str, ...], value: int) -> None:
    parsed = parse_spec(lora={})

    applied = apply_defaults(parsed, change_defaults(*path, value=value))

    changed: Any = applied.model_dump(by_alias=True)
    for name in path:
        changed = changed[name]
    assert changed == value
    assert applied.model_dump(exclude_unset=True) == parsed.model_dump(exclude_unset=True)


def test_fields_that_the_user_set_are_kept() -> None:
    parsed = parse_spec(lora={"r": 16}, numNodes=3)

    applied = apply_defaults(parsed, change_defaults("lora", "r", value=4))

    assert applied.lora is not None
    assert applied.lora.r == 16
    assert applied.num_nodes == 3


def test_an_absent_section_stays_absent() -> None:
    applied = apply_defaults(parse_spec(lora=None), change_defaults("lora", "r", value=4))

    assert applied.lora is None


@pytest.mark.parametrize(
    "recorded",
    ["", "no json", "[]", '"text"', '{"numNodes": "many", "training": 3, "fieldOfAnotherRelease": {"a": 1}}'],
)
def test_values_that_cannot_be_read_are_ignored(recorded: str) -> None:
    parsed = parse_spec()

    assert apply_defaults(parsed, recorded) == parsed


def test_a_parsed_job_has_the_defaults_of_its_snapshot() -> None:
    defaults = change_defaults("startupDeadlineSeconds", value=60)
    status = {"snapshot": {"image": "trainer:v1", "defaults": defaults}}
    metadata = {"name": "bert", "namespace": "default"}

    job = FineTuneJob.parse({"metadata": metadata, "spec": spec(), "status": status})

    assert job.spec.startup_deadline_seconds == 60
