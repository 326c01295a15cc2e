"""Tests of the commands `finetune plan` and `finetune validate`."""

import re
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from finetune_cli.app import app, main
from finetune_cli.plan import PLACEHOLDER_UID
from finetune_operator.plan.manifests import build_children
from finetune_operator.plan.run_plan import plan_run
from finetune_operator.settings import Settings
from testing.builders.job_files import job_body, job_file, write_yaml
from testing.builders.jobs import command

EXAMPLES = sorted(Path("manifests/examples").glob("*.yaml"))
SETTINGS = Settings(trainer_image="registry.example/trainer:v1")
BATCH = {"perDeviceTrainBatchSize": 1, "gradientAccumulationSteps": 16}


def test_plan_contains_the_objects_that_the_operator_creates(tmp_path: Path) -> None:
    file = job_file(tmp_path)
    job = file.job.model_copy(update={"metadata": file.job.metadata.model_copy(update={"uid": PLACEHOLDER_UID})})

    result = CliRunner().invoke(app, ["plan", str(file.path), "--trainer-image", SETTINGS.trainer_image])

    assert result.exit_code == 0, result.output
    assert tuple(yaml.safe_load_all(result.stdout)) == build_children(plan_run(job, attempt=0, settings=SETTINGS))


def test_plan_uses_the_uid_in_the_job_file(tmp_path: Path) -> None:
    body = job_body()
    body["metadata"]["uid"] = "1234"

    result = CliRunner().invoke(app, ["plan", str(write_yaml(tmp_path, body))])

    assert all(child["metadata"]["ownerReferences"][0]["uid"] == "1234" for child in yaml.safe_load_all(result.stdout))


def test_summary_contains_processes_batch_image_and_output(tmp_path: Path) -> None:
    path = write_yaml(tmp_path, job_body(training=BATCH, image="custom:v2"))

    result = CliRunner().invoke(app, ["plan", str(path), "-o", "summary", "-n", "team"])

    assert result.stdout.splitlines() == [
        "job      team/bert",
        "nodes    2 x 2 processes = 4 ranks",
        "devices  CPUs, ranks per node: 2; backend gloo",
        "batch    1 x 16 x 4 = 64 (per device x accumulation x ranks)",
        "rate     0.0001 cosine",
        "image    custom:v2",
        "output   models:team/bert/result",
        "objects  Service bert; ConfigMap bert-0-00000000; Pods bert-0-0, bert-0-1",
    ]


def test_planned_learning_rates_match_the_documentation(tmp_path: Path) -> None:
    page = Path("docs/user-guide/training.md").read_text()
    (example,) = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    path = write_yaml(tmp_path, yaml.safe_load(example))

    result = CliRunner().invoke(app, ["plan", str(path), "-o", "summary"])

    (line,) = [line for line in result.stdout.splitlines() if line.startswith("rate ")]
    assert line in page.splitlines()


def test_summary_shows_auto_for_values_that_the_trainer_chooses(tmp_path: Path) -> None:
    auto_batch = {"perDeviceTrainBatchSize": "auto", "globalBatchSize": 64}

    result = CliRunner().invoke(
        app, ["plan", str(write_yaml(tmp_path, job_body(training=auto_batch))), "-o", "summary"]
    )

    assert result.stdout.splitlines()[3] == "batch    auto x auto x 4 = 64 (per device x accumulation x ranks)"


def test_summary_of_a_custom_command_contains_the_command(tmp_path: Path) -> None:
    path = write_yaml(tmp_path, job_body(**command({"script": "train.py", "args": ["--lr", "1"]}, output=None)))

    result = CliRunner().invoke(app, ["plan", str(path), "-o", "summary"])

    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines()[2:6] == [
        "devices  CPUs, ranks per node: 2; backend gloo if the command uses torch",
        "command  torchrun train.py --lr 1",
        "image    registry.example/minimind:1",
        "output   none; only the pods' logs remain",
    ]


def test_examples_are_found() -> None:
    assert len(EXAMPLES) >= 3


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_every_example_is_valid(path: Path) -> None:
    result = CliRunner().invoke(app, ["validate", str(path)])

    assert result.exit_code == 0, result.output
    assert result.stdout.startswith(f"{path}: valid\n")


def test_invalid_job_file_prints_one_line_per_problem_and_exits_with_code_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_yaml(tmp_path, job_body(numNodes=0, lr=1))
    monkeypatch.setattr("sys.argv", ["finetune", "validate", str(path)])

    with pytest.raises(SystemExit) as raised:
        main()

    assert raised.value.code == 2
    assert sorted(capsys.readouterr().err.splitlines()) == [
        f"{path}: spec.lr: unknown field",
        f"{path}: spec.numNodes: must be greater than or equal to 1, found 0",
    ]
