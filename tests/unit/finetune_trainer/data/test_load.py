"""Tests loading, filtering and splitting the datasets of a job, and the messages for unusable rows."""

import copy
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from finetune_api.v1alpha1.dataset import Dataset
from finetune_trainer.data.load import TokenizationConfig, TrainingData, check_same_rows, load_data
from finetune_trainer.data.row_filter import RowRules
from finetune_trainer.data.row_rendering import build_sft_renderer
from finetune_trainer.data.token_cache import CacheRole
from finetune_trainer.errors import ChatTemplateError, DatasetError, InvalidSpec, OutputError
from finetune_trainer.startup_log import describe_data
from testing.fakes.downloads import NO_DOWNLOADS
from testing.models.tool_templates import GPT_OSS


def format_row(answer: str) -> str:
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": answer}]
    return json.dumps({"messages": messages}) + "\n"


def load_files(
    folder: Path,
    tokenizer: PreTrainedTokenizerFast,
    files: Sequence[Path | str],
    rules: RowRules | None = None,
    *,
    model_revision: str | None = None,
    template_kwargs: dict[str, Any] | None = None,
    **dataset_fields: Any,
) -> TrainingData:
    config = TokenizationConfig(
        tokenizer=tokenizer,
        model_name="tiny",
        row_renderer=build_sft_renderer("assistant"),
        rules=rules or RowRules(),
        seed=1,
        cache=folder / "cache",
        role=CacheRole.WRITER,
        send_heartbeat=lambda: None,
        downloads=NO_DOWNLOADS,
        model_revision=model_revision,
        template_kwargs=template_kwargs or {},
    )
    return load_data(
        Dataset.model_validate({"train": [{"name": str(file)} for file in files], **dataset_fields}), config
    )


def test_rows_are_tokenized_again_for_another_commit_of_the_model(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(format_row("answer"))

    for model_revision in (None, "1" * 40, "2" * 40, "2" * 40):
        load_files(tmp_path, tokenizer, [rows], model_revision=model_revision)

    assert len(list((tmp_path / "cache" / "tokens").glob("[!.]*"))) == 3


def test_rows_are_tokenized_again_for_other_variables_of_the_chat_template(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(format_row("answer"))
    own_tokenizer = copy.deepcopy(tokenizer)
    own_tokenizer.chat_template = GPT_OSS

    texts = [
        tokenizer.decode(load_files(tmp_path, own_tokenizer, [rows], template_kwargs=kwargs).train[0][0]["input_ids"])
        for kwargs in ({}, {"reasoning_effort": "low"})
    ]

    assert [text.partition("Reasoning: ")[2].partition("<")[0] for text in texts] == ["medium", "low"]


def test_a_variable_of_the_spec_that_the_template_does_not_read_is_an_error(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(format_row("answer"))

    with pytest.raises(InvalidSpec) as raised:
        load_files(tmp_path, tokenizer, [rows], template_kwargs={"enable_thinking": True})

    assert str(raised.value) == (
        'spec.dataset.chatTemplateKwargs: the chat template of model "tiny" has no variable enable_thinking; correct'
        " its name, or remove it"
    )


def test_the_log_counts_ignored_message_keys(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    messages = [{"role": "user", "content": "q", "id": 1}, {"role": "assistant", "content": "a", "id": 2}]
    file = tmp_path / "rows.jsonl"
    file.write_text(f"{json.dumps({'messages': messages})}\n{format_row('b')}{json.dumps({'messages': messages})}\n")

    data = load_files(tmp_path, tokenizer, [file])

    assert list(describe_data(data))[1] == (
        f'train: message key "id" is ignored in 2 rows: {file} line 1, {file} line 3'
    )


def test_sources_are_read_in_order(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    for name in ("b", "a"):
        (tmp_path / f"{name}.jsonl").write_text(format_row(f"answer {name}"))

    data = load_files(tmp_path, tokenizer, [tmp_path / "b.jsonl", tmp_path / "a.jsonl"])

    assert "answer b" in tokenizer.decode(data.train[0][0]["input_ids"])
    assert len(data.train) == 2
    assert data.eval is None


def test_the_log_lists_the_origins_of_dropped_rows(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(format_row("short") + format_row("long " * 200))

    data = load_files(tmp_path, tokenizer, [file], RowRules(max_length=64))

    lines = list(describe_data(data))
    assert lines[0].startswith("train: 1 of 2 rows, ")
    assert lines[1].startswith(f"train: 1 dropped, longer than 64 tokens: {file} line 2 (")


def test_the_log_counts_skipped_rows_and_lists_their_errors(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(format_row("good") + "{\n" + '{"text": "x"}\n' + format_row(""))

    data = load_files(tmp_path, tokenizer, [file], RowRules(on_bad_row="skip"))

    lines = list(describe_data(data))
    assert lines[0].startswith("train: 1 of 4 rows, ")
    assert lines[1].startswith(f"train: 3 skipped, cannot be used: {file} line 2, column 2: expected one JSON object")
    assert f"{file} line 3: expected columns" in lines[1]
    assert f"{file} line 4: turn 1 (assistant) is empty" in lines[1]


def test_a_row_that_the_chat_template_rejects_is_skipped_as_a_bad_row(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    strict_tokenizer = copy.deepcopy(tokenizer)
    strict_tokenizer.chat_template = (
        "{% for m in messages %}{% if m['content'] == 'no' %}{{ raise_exception('never') }}{% endif %}"
        "{{ m['content'] }}<|im_end|>{% endfor %}"
    )
    (tmp_path / "rows.jsonl").write_text(format_row("yes") + format_row("no"))

    data = load_files(tmp_path, strict_tokenizer, [tmp_path / "rows.jsonl"], RowRules(on_bad_row="skip"))

    assert (len(data.train), data.train.stats.bad.count) == (1, 1)
    with pytest.raises(ChatTemplateError, match=r"line 2: .*never"):
        load_files(tmp_path, strict_tokenizer, [tmp_path / "rows.jsonl"])


def test_sources_with_different_row_counts_have_separate_caches(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(format_row(f"answer {number}") for number in range(10)))

    sizes = [len(load_files(tmp_path, tokenizer, [f"{file}{number}"]).train) for number in ("", "#3", "#25", "#3")]

    assert sizes == [10, 3, 25, 3]


def test_rows_are_held_out_for_evaluation_according_to_the_split_ratio(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(format_row(f"answer {number}") for number in range(10)))

    data = load_files(tmp_path, tokenizer, [file], splitDatasetRatio=0.2)

    lines = list(describe_data(data))
    assert data.eval is not None
    assert (len(data.train), len(data.eval)) == (8, 2)
    assert lines[0].startswith("train: 8 of 10 rows, ")
    assert lines[-1].startswith("eval: 2 rows held out of train, ")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "the files contain no rows"),
        (format_row("long " * 200), r"of 1 rows 1 are longer than 64 tokens \(spec.dataset.max"),
    ],
    ids=["no rows", "all too long"],
)
def test_the_error_for_a_dataset_without_usable_rows_lists_the_reasons(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, content: str, message: str
) -> None:
    (tmp_path / "rows.jsonl").write_text(content)

    with pytest.raises(DatasetError, match=f"spec.dataset.train: no sample is left.*{message}"):
        load_files(tmp_path, tokenizer, [tmp_path / "rows.jsonl"], RowRules(max_length=64))


def test_the_error_for_a_dataset_of_bad_rows_lists_their_errors(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    (tmp_path / "rows.jsonl").write_text("{\n")

    with pytest.raises(DatasetError, match=r"of 1 rows 1 cannot be used: .*rows.jsonl line 1, column 2: expected one"):
        load_files(tmp_path, tokenizer, [tmp_path / "rows.jsonl"], RowRules(on_bad_row="skip"))


def test_the_error_for_a_missing_file_contains_the_spec_field(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    (tmp_path / "rows.jsonl").write_text(format_row("x"))

    with pytest.raises(DatasetError, match=r'spec.dataset.train\[1\].name: ".*gone.jsonl" does not exist'):
        load_files(tmp_path, tokenizer, [tmp_path / "rows.jsonl", tmp_path / "gone.jsonl"])


def test_an_unwritable_cache_raises_an_output_error(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "rows.jsonl").write_text(format_row("x"))

    def raise_permission_error(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "mkdir", raise_permission_error)

    with pytest.raises(OutputError, match=r"cache cannot be written \(Permission denied\)"):
        load_files(tmp_path, tokenizer, [tmp_path / "rows.jsonl"])


def test_the_error_for_ranks_with_different_rows_contains_the_node_number(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    for count in (2, 3):
        (tmp_path / f"{count}.jsonl").write_text(format_row("a") * count)
    two_rows, three_rows = (load_files(tmp_path, tokenizer, [tmp_path / f"{count}.jsonl"]) for count in (2, 3))

    check_same_rows([two_rows.digest] * 4, ranks_per_node=2)
    with pytest.raises(DatasetError, match="node 1 reads other rows than node 0"):
        check_same_rows([two_rows.digest, two_rows.digest, three_rows.digest, three_rows.digest], ranks_per_node=2)
