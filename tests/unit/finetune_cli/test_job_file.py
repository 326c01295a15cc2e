"""Tests of reading job files and of the messages about invalid files."""

from pathlib import Path

import pytest

from finetune_api.schema.validation_errors import MAX_PROBLEMS
from finetune_cli.errors import BadInput
from finetune_cli.job_file import read_job_file
from testing.builders.bad_jobs import BAD_JOBS
from testing.builders.job_files import job_body, write_yaml


def list_problems(path: Path, *, namespace: str | None = None) -> tuple[str, ...]:
    with pytest.raises(BadInput) as raised:
        read_job_file(path, namespace=namespace)
    return tuple(problem.removeprefix(f"{path}: ") for problem in raised.value.problems)


def test_each_problem_is_one_line_with_its_field(tmp_path: Path) -> None:
    path = write_yaml(tmp_path, job_body(numNodes=0, training={"learningRate": "fast"}, dataset={"train": [{}]}, lr=1))

    assert sorted(list_problems(path)) == [
        "spec.dataset.train[0].name: is required",
        "spec.lr: unknown field",
        "spec.numNodes: must be greater than or equal to 1, found 0",
        'spec.training.learningRate: must be a number, found "fast"',
    ]


@pytest.mark.parametrize("case", BAD_JOBS)
def test_every_bad_job_is_rejected(case: str, tmp_path: Path) -> None:
    messages = list_problems(write_yaml(tmp_path, job_body(**BAD_JOBS[case].fields)))

    assert any(BAD_JOBS[case].model_error in line for line in messages), messages


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        pytest.param("a: [1", "line 1, column 6: expected ',' or ']', but got '<stream end>'", id="broken YAML"),
        pytest.param("a: 1\nb: {c: 1, c: 2}", "line 2, column 11: c is given twice", id="duplicate key"),
        pytest.param("just words", "expected a FineTuneJob, found str", id="not an object"),
        pytest.param("", "kind: expected one FineTuneJob, found nothing", id="empty file"),
        pytest.param("kind: Job", "kind: expected one FineTuneJob, found Job", id="another kind"),
        pytest.param(
            "kind: FineTuneJob\napiVersion: v1",
            "apiVersion: expected finetune.dev/v1alpha1, found v1",
            id="another version",
        ),
        pytest.param(
            "kind: FineTuneJob\napiVersion: finetune.dev/v1alpha1",
            "metadata.name: is required",
            id="no metadata",
        ),
        pytest.param("kind: [x]", "kind: expected one FineTuneJob, found ['x']", id="list as kind"),
        pytest.param(
            "--- {kind: x}\n" * 1000,
            f"kind: expected one FineTuneJob, found {', '.join('x' * 10)}",
            id="many objects",
        ),
        pytest.param(
            "&a [*a]",
            "line 1, column 5: is nested too deeply: more than 50 levels, with aliases written out",
            id="cycle",
        ),
        pytest.param("x" * 2_000_000, "has more than 1000000 characters", id="long file"),
    ],
)
def test_file_without_exactly_one_valid_job_is_rejected(text: str, expected: str, tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(text)

    assert list_problems(path) == (expected,)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        pytest.param("b" * 53, "metadata.name: must have at most 52 characters; this one has 53", id="too long"),
        pytest.param(
            "1st",
            "metadata.name: 1st: must start with a-z, contain only a-z, 0-9 and '-', and not end with '-'",
            id="invalid as the name of a Service",
        ),
    ],
)
def test_name_that_is_invalid_for_pods_and_services_is_rejected(name: str, expected: str, tmp_path: Path) -> None:
    assert list_problems(write_yaml(tmp_path, job_body(name=name))) == (expected,)


@pytest.mark.parametrize("namespace", ["../../../escaped", "a/b", "..", "Team", "n" * 64])
def test_namespace_that_is_no_dns_label_is_rejected(namespace: str, tmp_path: Path) -> None:
    """A local run would write to a folder of this name, and a client sends it in a path."""
    problem = f"metadata.namespace: {namespace!r}: must have at most 63 characters a-z, 0-9 and '-', and start"
    body = job_body()
    path = write_yaml(tmp_path, {**body, "metadata": {**body["metadata"], "namespace": namespace}})
    assert [text.startswith(problem) for text in list_problems(path)] == [True]
    assert [text.startswith(problem) for text in list_problems(write_yaml(tmp_path, body), namespace=namespace)] == [
        True
    ]


def test_unknown_top_level_field_is_rejected_with_a_suggestion(tmp_path: Path) -> None:
    path = write_yaml(tmp_path, {**job_body(), "numNodes": 2, "notes": "text"})

    assert set(list_problems(path)) == {"numNodes: unknown field; did you mean spec.numNodes?", "notes: unknown field"}


@pytest.mark.parametrize("fields", ["top level", "spec"])
def test_many_problems_are_bounded(fields: str, tmp_path: Path) -> None:
    unknown = {f"unknown{number}": 1 for number in range(2 * MAX_PROBLEMS)}
    body = job_body()
    (body if fields == "top level" else body["spec"]).update(unknown)

    assert len(list_problems(write_yaml(tmp_path, body))) == MAX_PROBLEMS


def test_missing_file_is_reported(tmp_path: Path) -> None:
    assert list_problems(tmp_path / "absent.yaml") == ("No such file or directory",)


def test_string_in_place_of_a_number_is_rejected(tmp_path: Path) -> None:
    messages = list_problems(write_yaml(tmp_path, job_body(numNodes="2")))

    assert messages == ('spec.numNodes: must be an integer, found "2"',)


def test_scientific_notation_is_parsed_as_a_number(tmp_path: Path) -> None:
    path = write_yaml(tmp_path, job_body(training={"learningRate": 123}))
    path.write_text(path.read_text().replace("123", "1e-4"))

    assert read_job_file(path).job.spec.training.learning_rate == 1e-4


def test_other_objects_in_the_file_are_ignored(tmp_path: Path) -> None:
    claim = {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": "models"}}

    assert read_job_file(write_yaml(tmp_path, claim, job_body())).job.metadata.name == "bert"


def test_two_jobs_in_one_file_are_rejected(tmp_path: Path) -> None:
    path = write_yaml(tmp_path, job_body(), job_body(name="other"))

    assert list_problems(path) == ("kind: expected one FineTuneJob, found FineTuneJob, FineTuneJob",)


def test_namespace_is_read_from_option_or_file_and_defaults_to_default(tmp_path: Path) -> None:
    path = write_yaml(tmp_path, job_body())
    assert read_job_file(path).job.metadata.namespace == "default"
    assert read_job_file(path, namespace="team").job.metadata.namespace == "team"

    body = job_body()
    body["metadata"]["namespace"] = "team"
    path = write_yaml(tmp_path, body)
    assert read_job_file(path).job.metadata.namespace == "team"
    assert list_problems(path, namespace="other") == ("metadata.namespace: is team, but --namespace is other",)
