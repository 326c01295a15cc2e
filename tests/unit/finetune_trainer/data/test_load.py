import copy
import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from finetune_api.v1alpha1.dataset import Dataset
from finetune_trainer.data.load import Data, Method, Tokenizing, check_same, load_data
from finetune_trainer.data.row_filter import Rules
from finetune_trainer.errors import ChatTemplateError, DatasetError, OutputError
from finetune_trainer.methods.sft import render_sample
from finetune_trainer.startup_log import describe_data
from testing.fakes.downloads import NONE


def row(answer: str) -> str:
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": answer}]
    return json.dumps({"messages": messages}) + "\n"


def load(
    folder: Path,
    tokenizer: PreTrainedTokenizerFast,
    files: Sequence[Path | str],
    rules: Rules | None = None,
    **fields: Any,
) -> Data:
    how = Tokenizing(
        tokenizer=tokenizer,
        model_name="tiny",
        method=Method("sft", partial(render_sample, loss_on="assistant")),
        rules=rules or Rules(),
        seed=1,
        cache=folder / "cache",
        writes=True,
        alive=lambda: None,
        downloads=NONE,
    )
    return load_data(Dataset.model_validate({"train": [{"name": str(file)} for file in files], **fields}), how)


def test_sources_are_read_in_order(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    for name in ("b", "a"):
        (tmp_path / f"{name}.jsonl").write_text(row(f"answer {name}"))

    data = load(tmp_path, tokenizer, [tmp_path / "b.jsonl", tmp_path / "a.jsonl"])

    assert ["answer b" in tokenizer.decode(data.train[0][0]["input_ids"]), len(data.train)] == [True, 2]
    assert data.eval is None


def test_dropped_samples_are_told_with_their_places(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(row("short") + row("long " * 200))

    data = load(tmp_path, tokenizer, [file], Rules(max_length=64))

    told = list(describe_data(data))
    assert told[0].startswith("train: 1 of 2 rows, ")
    assert told[1].startswith(f"train: 1 dropped, longer than 64 tokens: {file} line 2 (")


def test_bad_rows_are_skipped_counted_and_told_with_what_is_wrong(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(row("good") + "{\n" + '{"text": "x"}\n' + row(""))

    data = load(tmp_path, tokenizer, [file], Rules(on_bad_row="skip"))

    told = list(describe_data(data))
    assert told[0].startswith("train: 1 of 4 rows, ")
    assert told[1].startswith(f"train: 3 skipped, cannot be used: {file} line 2, column 2: expected one JSON object")
    assert f"{file} line 3: expected columns" in told[1]
    assert f"{file} line 4: turn 1 is the assistant's and empty" in told[1]


def test_a_row_that_the_template_refuses_is_a_bad_row(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    picky = copy.deepcopy(tokenizer)
    picky.chat_template = (
        "{% for m in messages %}{% if m['content'] == 'no' %}{{ raise_exception('never') }}{% endif %}"
        "{{ m['content'] }}<|im_end|>{% endfor %}"
    )
    (tmp_path / "rows.jsonl").write_text(row("yes") + row("no"))

    data = load(tmp_path, picky, [tmp_path / "rows.jsonl"], Rules(on_bad_row="skip"))

    assert (len(data.train), data.train.counted.bad.count) == (1, 1)
    with pytest.raises(ChatTemplateError, match=r"line 2: .*never"):
        load(tmp_path, picky, [tmp_path / "rows.jsonl"])


def test_a_sample_of_a_source_is_kept_apart_from_the_whole(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(row(f"answer {number}") for number in range(10)))

    sizes = [len(load(tmp_path, tokenizer, [f"{file}{number}"]).train) for number in ("", "#3", "#25", "#3")]

    assert sizes == [10, 3, 25, 3]


def test_rows_are_held_out_to_evaluate_on(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(row(f"answer {number}") for number in range(10)))

    data = load(tmp_path, tokenizer, [file], splitDatasetRatio=0.2)

    told = list(describe_data(data))
    assert data.eval is not None
    assert (len(data.train), len(data.eval)) == (8, 2)
    assert told[0].startswith("train: 8 of 10 rows, ")
    assert told[-1].startswith("eval: 2 rows held out of train, ")


@pytest.mark.parametrize(
    ("content", "words"),
    [("", "the files hold no rows"), (row("long " * 200), r"of 1 rows 1 are longer than 64 tokens \(spec.dataset.max")],
    ids=["no rows", "all too long"],
)
def test_nothing_left_is_an_error_that_says_why(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, content: str, words: str
) -> None:
    (tmp_path / "rows.jsonl").write_text(content)

    with pytest.raises(DatasetError, match=f"spec.dataset.train: no sample is left.*{words}"):
        load(tmp_path, tokenizer, [tmp_path / "rows.jsonl"], Rules(max_length=64))


def test_nothing_left_of_bad_rows_says_what_is_wrong_with_them(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    (tmp_path / "rows.jsonl").write_text("{\n")

    with pytest.raises(DatasetError, match=r"of 1 rows 1 cannot be used: .*rows.jsonl line 1, column 2: expected one"):
        load(tmp_path, tokenizer, [tmp_path / "rows.jsonl"], Rules(on_bad_row="skip"))


def test_a_missing_file_is_told_with_its_field(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    (tmp_path / "rows.jsonl").write_text(row("x"))

    with pytest.raises(DatasetError, match=r'spec.dataset.train\[1\].name: ".*gone.jsonl" does not exist'):
        load(tmp_path, tokenizer, [tmp_path / "rows.jsonl", tmp_path / "gone.jsonl"])


def test_a_cache_that_cannot_be_written_is_named(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "rows.jsonl").write_text(row("x"))

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "mkdir", refuse)

    with pytest.raises(OutputError, match=r"cache cannot be written \(Permission denied\)"):
        load(tmp_path, tokenizer, [tmp_path / "rows.jsonl"])


def test_other_rows_on_another_node_are_named(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    for count in (2, 3):
        (tmp_path / f"{count}.jsonl").write_text(row("a") * count)
    few, more = (load(tmp_path, tokenizer, [tmp_path / f"{count}.jsonl"]) for count in (2, 3))

    check_same([few.digest] * 4, per_node=2)
    with pytest.raises(DatasetError, match="node 1 does not read the rows that node 0 reads"):
        check_same([few.digest, few.digest, more.digest, more.digest], per_node=2)
