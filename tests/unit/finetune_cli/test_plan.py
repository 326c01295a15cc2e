"""`finetune plan` and `finetune validate`, as their users start them."""

import re
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from finetune_cli.app import app, main
from finetune_cli.plan import NO_UID
from finetune_operator.plan.manifests import build_children
from finetune_operator.plan.run_plan import Settings, plan_run
from testing.builders.job_files import job_body, job_file, write_yaml
from testing.builders.jobs import command

EXAMPLES = sorted(Path("manifests/examples").glob("*.yaml"))
SETTINGS = Settings(trainer_image="registry.example/trainer:v1")
BATCH = {"perDeviceTrainBatchSize": 1, "gradientAccumulationSteps": 16}


def test_the_plan_is_what_the_operator_builds(tmp_path: Path) -> None:
    file = job_file(tmp_path)
    job = file.job.model_copy(update={"metadata": file.job.metadata.model_copy(update={"uid": NO_UID})})

    said = CliRunner().invoke(app, ["plan", str(file.path), "--trainer-image", SETTINGS.trainer_image])

    assert said.exit_code == 0, said.output
    assert tuple(yaml.safe_load_all(said.stdout)) == build_children(plan_run(job, attempt=0, settings=SETTINGS))


def test_a_uid_in_the_file_is_used(tmp_path: Path) -> None:
    body = job_body()
    body["metadata"]["uid"] = "1234"

    said = CliRunner().invoke(app, ["plan", str(write_yaml(tmp_path, body))])

    assert all(child["metadata"]["ownerReferences"][0]["uid"] == "1234" for child in yaml.safe_load_all(said.stdout))


def test_the_summary_says_processes_batch_and_output(tmp_path: Path) -> None:
    path = write_yaml(tmp_path, job_body(training=BATCH, image="mine:v2"))

    said = CliRunner().invoke(app, ["plan", str(path), "-o", "summary", "-n", "team"])

    assert said.stdout.splitlines() == [
        "job      team/bert",
        "nodes    2 x 2 processes = 4 ranks",
        "batch    1 x 16 x 4 = 64 (per device x accumulation x ranks)",
        "rate     0.0001 cosine",
        "image    mine:v2",
        "output   models:team/bert/result",
        "objects  Service bert; ConfigMap bert-0; Pods bert-0-0, bert-0-1",
    ]


def test_rates_are_planned_as_their_page_shows(tmp_path: Path) -> None:
    page = Path("docs/user-guide/training.md").read_text()
    (shown,) = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    path = write_yaml(tmp_path, yaml.safe_load(shown))

    said = CliRunner().invoke(app, ["plan", str(path), "-o", "summary"])

    (line,) = [line for line in said.stdout.splitlines() if line.startswith("rate ")]
    assert line in page.splitlines()


def test_the_summary_says_what_is_left_to_the_trainer(tmp_path: Path) -> None:
    auto = {"perDeviceTrainBatchSize": "auto", "globalBatchSize": 64}

    said = CliRunner().invoke(app, ["plan", str(write_yaml(tmp_path, job_body(training=auto))), "-o", "summary"])

    assert said.stdout.splitlines()[2] == "batch    auto x auto x 4 = 64 (per device x accumulation x ranks)"


def test_the_summary_of_a_command_says_what_is_started(tmp_path: Path) -> None:
    path = write_yaml(tmp_path, job_body(**command({"script": "train.py", "args": ["--lr", "1"]}, output=None)))

    said = CliRunner().invoke(app, ["plan", str(path), "-o", "summary"])

    assert said.exit_code == 0, said.output
    assert said.stdout.splitlines()[2:5] == [
        "command  torchrun train.py --lr 1",
        "image    registry.example/minimind:1",
        "output   none; only the pods' logs tell of it",
    ]


def test_there_are_examples() -> None:
    assert len(EXAMPLES) >= 3


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_every_example_is_valid(path: Path) -> None:
    said = CliRunner().invoke(app, ["validate", str(path)])

    assert said.exit_code == 0, said.output
    assert said.stdout.startswith(f"{path}: valid\n")


def test_bad_input_is_a_line_per_problem_and_exit_code_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_yaml(tmp_path, job_body(numNodes=0, lr=1))
    monkeypatch.setattr("sys.argv", ["finetune", "validate", str(path)])

    with pytest.raises(SystemExit) as ended:
        main()

    assert ended.value.code == 2
    assert sorted(capsys.readouterr().err.splitlines()) == [
        f"{path}: spec.lr: unknown field",
        f"{path}: spec.numNodes: must be greater than or equal to 1, found 0",
    ]
