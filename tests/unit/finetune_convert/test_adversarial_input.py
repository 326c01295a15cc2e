"""Tests of malicious, broken and oversized input: an error with its position, nothing executed, bounded time."""

import time
from pathlib import Path

import pytest

from finetune_convert.conversion import MAX_INPUT_BYTES, ConversionError, ConversionRequest, InputKind, JobForm
from finetune_convert.convert import convert

SWIFT = "swift sft --model a/b --dataset /data/x.jsonl"
ALIASES = "\n".join(["a0: &a0 [x, x]", *(f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]" for n in range(1, 30)), "base_model: a"])


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        pytest.param("", "is empty", id="empty"),
        pytest.param(" \n\t", "is empty", id="blank"),
        pytest.param("x" * (MAX_INPUT_BYTES + 1), "more than 1000000 bytes", id="too many bytes"),
        pytest.param("swift\x00sft", "control character", id="binary"),
        pytest.param("\x7fELF\x02\x01\x01", "control character", id="executable"),
        pytest.param(
            f"{SWIFT} --learning_rate $(rm -rf /)",
            "line 1: --learning_rate: .* only known to a shell",
            id="substitution",
        ),
        pytest.param(f"{SWIFT} --seed `id`", "only known to a shell", id="backticks"),
        pytest.param(f"{SWIFT} --seed $SEED", "only known to a shell", id="undefined variable"),
        pytest.param(
            "torchrun train.py $(curl x | sh)", "line 1: .* only known to a shell", id="substitution in a command"
        ),
        pytest.param("for i in 1 2; do swift sft; done", "line 1: a loop", id="loop"),
        pytest.param("$(" * 200 + ")" * 200, "line 1", id="nested substitutions"),
        pytest.param("(" * 5000, "line 1", id="nested parentheses"),
        pytest.param(f'{SWIFT} "{"${a:-" * 100}', "line 1", id="nested expansions"),
        pytest.param("'" + "a" * 1000, "no valid shell text", id="open quote"),
        pytest.param("rm -rf /", "no training command", id="no training"),
        pytest.param("--model a \\\n --dataset b", "begins with an option", id="only options"),
        pytest.param("swift infer --model a/b", "no training command", id="inference"),
        pytest.param("swift sft --dataset x.jsonl", "names no model", id="no model"),
        pytest.param("swift sft --model a/b", "names no dataset", id="no dataset"),
        pytest.param(
            f"{SWIFT} --learning_rate fast", "line 1: --learning_rate: expected a number, found fast", id="no number"
        ),
        pytest.param(
            f"{SWIFT}\n{SWIFT} --seed 3", "lines 1, 2: these commands start different trainings", id="two trainings"
        ),
        pytest.param("NPROC_PER_NODE=1000 " + SWIFT, "number of GPUs must be from 1 to 64", id="too many GPUs"),
        pytest.param("torchrun --nproc_per_node 2", "starts no script", id="no script"),
        pytest.param(ALIASES, "aliases", id="YAML bomb"),
        pytest.param("base_model: " + "[" * 200, "line 1", id="nested YAML"),
        pytest.param(
            "base_model: a\n" + "\n".join(f"k{n}: 1" for n in range(60_000)), "too large", id="many YAML keys"
        ),
        pytest.param("base_model: !!python/object/apply:os.system [id]", "line 1", id="YAML tag"),
        pytest.param("a: 1\nb: 2", "no config of LLaMA-Factory or axolotl", id="unknown YAML"),
        pytest.param("apiVersion: v1\nkind: Pod", "expected PyTorchJob or TrainJob, found Pod", id="unknown kind"),
        pytest.param(
            "apiVersion: kubeflow.org/v1\nkind: PyTorchJob\nmetadata: {name: a}",
            "pytorchReplicaSpecs",
            id="no replicas",
        ),
        pytest.param("stage: sft\nmodel_name_or_path: a/b", "no dataset", id="no rows"),
    ],
)
def test_bad_input_is_an_error_within_a_few_seconds(text: str, problem: str) -> None:
    started_at = time.process_time()
    with pytest.raises(ConversionError, match=problem):
        convert(text, ConversionRequest())

    assert time.process_time() - started_at < 10


def test_nothing_of_the_input_is_executed(tmp_path: Path) -> None:
    target = tmp_path / "executed"
    text = f"export X=$(touch {target})\n`touch {target}`\n{SWIFT} --output_dir $(touch {target})\n"
    convert(text, ConversionRequest())

    assert not target.exists()


def test_a_megabyte_of_arguments_is_converted_or_refused_within_a_few_seconds() -> None:
    started_at = time.process_time()
    with pytest.raises(ConversionError):
        convert("torchrun train.py " + "--a b " * 150_000, ConversionRequest())

    assert time.process_time() - started_at < 20


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"name": "Bad_Name"}, "--name"),
        ({"tool_version": 7}, "versions 2, 3 and 4"),
        ({"source": InputKind.AXOLOTL}, "expected a YAML mapping"),
        ({"source": InputKind.LLAMAFACTORY}, "expected llamafactory-cli train"),
        ({"gpus": 1000}, "number of GPUs"),
    ],
)
def test_a_flag_that_does_not_fit_is_an_error(fields: dict[str, object], problem: str) -> None:
    with pytest.raises(ConversionError, match=problem):
        convert(SWIFT, ConversionRequest(**fields))  # type: ignore[arg-type]


def test_the_form_of_an_unsupported_method_cannot_be_forced() -> None:
    with pytest.raises(ConversionError, match="--form trainer: this trainer has no grpo"):
        convert("swift rlhf --rlhf_type grpo --model a/b --dataset c", ConversionRequest(form=JobForm.TRAINER))


@pytest.mark.parametrize(
    ("text", "fields", "problem"),
    [
        ("torchrun train.py", {"form": JobForm.TRAINER}, "can only run as a command"),
        ("torchrun train.py", {"tool_version": 3}, "--tool-version applies to ms-swift only"),
        ("base_model: a/b\nrl: kto\ndatasets: []", {"form": JobForm.TRAINER}, "this trainer has no rl: kto"),
    ],
)
def test_a_flag_without_effect_is_an_error(text: str, fields: dict[str, object], problem: str) -> None:
    with pytest.raises(ConversionError, match=problem):
        convert(text, ConversionRequest(**fields))  # type: ignore[arg-type]
