"""What a job file may not say, and in which words it is refused."""

from pathlib import Path
from typing import Any

import pytest

from finetune_cli.errors import BadInput
from finetune_cli.job_file import read_job_file
from testing.builders.bad_jobs import BAD_JOBS
from testing.builders.job_files import job_body, write_yaml

Raw = dict[str, Any]


def problems(path: Path, *, namespace: str | None = None) -> tuple[str, ...]:
    with pytest.raises(BadInput) as refused:
        read_job_file(path, namespace=namespace)
    return tuple(problem.removeprefix(f"{path}: ") for problem in refused.value.problems)


def test_every_problem_is_a_line_with_its_field(tmp_path: Path) -> None:
    path = write_yaml(tmp_path, job_body(numNodes=0, training={"learningRate": "fast"}, dataset={"train": [{}]}, lr=1))

    assert sorted(problems(path)) == [
        "spec.dataset.train[0].name: is required",
        "spec.lr: unknown field",
        "spec.numNodes: must be greater than or equal to 1, found 0",
        'spec.training.learningRate: must be a number, found "fast"',
    ]


@pytest.mark.parametrize("case", BAD_JOBS)
def test_what_the_api_server_refuses_is_refused_here(case: str, tmp_path: Path) -> None:
    said = problems(write_yaml(tmp_path, job_body(**BAD_JOBS[case].fields)))

    assert any(BAD_JOBS[case].models in line for line in said), said


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        pytest.param("a: [1", "line 1, column 6: expected ',' or ']', but got '<stream end>'", id="broken YAML"),
        pytest.param("a: 1\nb: {c: 1, c: 2}", "line 2, column 11: c is given twice", id="a key given twice"),
        pytest.param("just words", "expected a FineTuneJob, found str", id="no object"),
        pytest.param("", "kind: expected one FineTuneJob, found nothing", id="an empty file"),
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
    ],
)
def test_a_file_that_holds_no_job_is_refused(text: str, expected: str, tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(text)

    assert problems(path) == (expected,)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        pytest.param("b" * 53, "metadata.name: must have at most 52 characters; this one has 53", id="too long"),
        pytest.param(
            "1st",
            "metadata.name: 1st: must start with a-z and hold only a-z, 0-9 and '-', with no '-' at its end",
            id="no name for a Service",
        ),
    ],
)
def test_a_name_that_pods_could_not_have_is_refused(name: str, expected: str, tmp_path: Path) -> None:
    assert problems(write_yaml(tmp_path, job_body(name=name))) == (expected,)


def test_a_field_beside_spec_is_refused_and_where_it_belongs_is_told(tmp_path: Path) -> None:
    path = write_yaml(tmp_path, {**job_body(), "numNodes": 2, "notes": "mine"})

    assert set(problems(path)) == {"numNodes: unknown field; did you mean spec.numNodes?", "notes: unknown field"}


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    assert problems(tmp_path / "absent.yaml") == ("No such file or directory",)


def test_types_are_as_strict_as_the_api_servers(tmp_path: Path) -> None:
    said = problems(write_yaml(tmp_path, job_body(numNodes="2")))

    assert said == ('spec.numNodes: must be an integer, found "2"',)


def test_a_number_in_scientific_notation_is_a_number(tmp_path: Path) -> None:
    path = write_yaml(tmp_path, job_body(training={"learningRate": 123}))
    path.write_text(path.read_text().replace("123", "1e-4"))

    assert read_job_file(path).job.spec.training.learning_rate == 1e-4


def test_other_objects_beside_the_job_are_left_alone(tmp_path: Path) -> None:
    claim = {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": "models"}}

    assert read_job_file(write_yaml(tmp_path, claim, job_body())).job.metadata.name == "bert"


def test_two_jobs_in_one_file_are_refused(tmp_path: Path) -> None:
    path = write_yaml(tmp_path, job_body(), job_body(name="other"))

    assert problems(path) == ("kind: expected one FineTuneJob, found FineTuneJob, FineTuneJob",)


def test_the_namespace_is_the_options_the_files_or_default(tmp_path: Path) -> None:
    path = write_yaml(tmp_path, job_body())
    assert read_job_file(path).job.metadata.namespace == "default"
    assert read_job_file(path, namespace="team").job.metadata.namespace == "team"

    body = job_body()
    body["metadata"]["namespace"] = "team"
    path = write_yaml(tmp_path, body)
    assert read_job_file(path).job.metadata.namespace == "team"
    assert problems(path, namespace="other") == ("metadata.namespace: is team, but --namespace says other",)
