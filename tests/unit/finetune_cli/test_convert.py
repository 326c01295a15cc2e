"""Tests of the command `finetune convert`: output, exit codes and flags."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from finetune_cli.app import app
from finetune_cli.errors import BadInput
from finetune_cli.job_file import read_job_file

COMMAND = (
    "CUDA_VISIBLE_DEVICES=0,1 NPROC_PER_NODE=2 swift sft --train_type lora --model Qwen/Qwen2.5-7B-Instruct"
    " --dataset train.jsonl --warmup_ratio 0.05"
)
RUNNER = CliRunner()


@pytest.fixture
def command_file(tmp_path: Path) -> Path:
    path = tmp_path / "train.sh"
    path.write_text(COMMAND)
    return path


def run(*arguments: str, text: str | None = None) -> str:
    result = RUNNER.invoke(app, ["convert", *arguments], input=text)
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0
    return result.stdout


def test_the_printed_job_is_a_valid_job_file(command_file: Path, tmp_path: Path) -> None:
    job = tmp_path / "job.yaml"
    job.write_text(run(str(command_file)))

    assert read_job_file(job).job.spec.world_size == 2


def test_standard_input_is_read() -> None:
    assert yaml.safe_load(run("-", text=COMMAND))["metadata"]["name"] == "qwen2-5-7b-instruct-sft"


def test_flags_replace_assumptions(command_file: Path) -> None:
    flags = ("--name", "first", "--output-claim", "results", "--volume", "rows:/rows", "--gpus", "4", "--nodes", "2")
    spec = yaml.safe_load(run(str(command_file), *flags))["spec"]

    assert spec["output"] == {"persistentVolumeClaim": {"claimName": "results"}}
    assert spec["dataset"]["train"] == [{"name": "/rows/train.jsonl"}]
    assert spec["volumes"] == [{"name": "rows", "mountPath": "/rows", "persistentVolumeClaim": {"claimName": "rows"}}]
    assert (spec["numNodes"], spec["resources"]) == (2, {"limits": {"nvidia.com/gpu": 4}})


def test_the_original_program_can_be_requested(command_file: Path) -> None:
    spec = yaml.safe_load(run(str(command_file), "--form", "command", "--image", "swift:1"))["spec"]

    assert spec["image"] == "swift:1"
    assert spec["command"]["exec"][:4] == ["swift", "sft", "--train_type", "lora"]


def test_json_contains_the_job_and_every_entry(command_file: Path) -> None:
    content = json.loads(run(str(command_file), "--output", "json"))
    entries = {entry["option"]: entry for entry in content["entries"]}

    assert content["job"]["kind"] == "FineTuneJob"
    assert entries["train_type"]["effect"] == "mapped"
    assert entries["warmup_ratio"]["effect"] == "changed"
    assert entries["model"]["field"] == "spec.model.name"


def test_the_summary_lists_the_differences_without_the_job(command_file: Path) -> None:
    summary = run(str(command_file), "--output", "summary")

    assert "not taken over, the training differs (1)\n  line 1: warmup_ratio" in summary
    assert "apiVersion" not in summary


def test_strict_fails_if_an_option_was_not_taken_over(command_file: Path) -> None:
    result = RUNNER.invoke(app, ["convert", str(command_file), "--strict"])
    complete = RUNNER.invoke(app, ["convert", "-", "--strict", "--rows", "800"], input=COMMAND)

    assert (result.exit_code, complete.exit_code) == (1, 0)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("missing.sh",), "missing.sh: No such file"),
        (("-", "--volume", "datasets"), "--volume: datasets: expected CLAIM:/PATH"),
        (("-", "--volume", "-a:/data"), "--volume: -a:/data: expected CLAIM:/PATH"),
        (("-", "--dataset", "alpaca"), "--dataset: alpaca: expected NAME=SOURCE"),
    ],
)
def test_bad_arguments_are_an_error_with_the_flag(arguments: tuple[str, ...], problem: str) -> None:
    with pytest.raises(BadInput, match=problem):
        run(*arguments, text=COMMAND)


def test_a_file_that_is_no_text_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "model.bin"
    path.write_bytes(b"\xff\xfe\x00")

    with pytest.raises(BadInput, match="is not UTF-8 text"):
        run(str(path))


def test_the_differences_are_on_standard_error_and_bad_input_has_exit_code_2() -> None:
    command = (sys.executable, "-m", "finetune_cli", "convert", "-")
    good, bad = (subprocess.run(command, input=text, capture_output=True, text=True) for text in (COMMAND, "ls"))

    assert (good.returncode, bad.returncode) == (0, 2)
    assert "defaults of the tool, stated in the job" in good.stderr
    assert bad.stderr.startswith("-: the text contains no training command; found ls")
    assert bad.stdout == ""


def test_other_commands_do_not_need_the_parser_of_shell_text() -> None:
    program = "import sys; sys.modules['tree_sitter'] = None; import finetune_cli.app"

    subprocess.run([sys.executable, "-c", program], check=True)
