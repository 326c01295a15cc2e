import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from finetune_api.v1alpha1 import Dataset
from finetune_trainer.banner import describe_data
from finetune_trainer.data.load import Data, Method, Tokenizing, load_data
from finetune_trainer.errors import DatasetError, OutputError
from finetune_trainer.methods.sft import render_sample


def row(answer: str) -> str:
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": answer}]
    return json.dumps({"messages": messages}) + "\n"


def load(
    folder: Path, tokenizer: PreTrainedTokenizerFast, files: Sequence[Path], *, max_length: int | None = None
) -> Data:
    how = Tokenizing(
        tokenizer=tokenizer,
        model_name="tiny",
        method=Method("sft", partial(render_sample, loss_on="assistant")),
        max_length=max_length,
        cache=folder / "cache",
        writes=True,
        alive=lambda: None,
    )
    return load_data(Dataset.model_validate({"train": [{"name": str(file)} for file in files]}), how)


def test_sources_are_read_in_order(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    for name in ("b", "a"):
        (tmp_path / f"{name}.jsonl").write_text(row(f"answer {name}"))

    data = load(tmp_path, tokenizer, [tmp_path / "b.jsonl", tmp_path / "a.jsonl"])

    assert ["answer b" in tokenizer.decode(data.train[0][0]["input_ids"]), len(data.train)] == [True, 2]
    assert data.eval is None


def test_dropped_samples_are_told_with_their_places(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(row("short") + row("long " * 200))

    data = load(tmp_path, tokenizer, [file], max_length=64)

    told = list(describe_data(data))
    assert told[0].startswith("train: 1 of 2 rows, ")
    assert told[1].startswith(f"train: dropped, longer than 64 tokens: {file} line 2 (")


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
        load(tmp_path, tokenizer, [tmp_path / "rows.jsonl"], max_length=64)


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
