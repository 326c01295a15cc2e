"""Tests that a job goes on with the rows of its checkpoints, or is refused with the cause (decisions/547)."""

import copy
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tokenizers import processors
from transformers import PreTrainedTokenizerFast

from finetune_api.v1alpha1.dataset import Dataset
from finetune_trainer.atomic_files import write_json
from finetune_trainer.checkpoint.checkpoints import Checkpoints
from finetune_trainer.checkpoint.output_folder import OutputFolder
from finetune_trainer.checksums import seal
from finetune_trainer.data.load import TokenizationConfig, TrainingData, load_data
from finetune_trainer.data.row_filter import RowRules
from finetune_trainer.data.row_rendering import build_sft_renderer
from finetune_trainer.data.token_cache import CacheRole, compute_cache_key
from finetune_trainer.errors import OutputError
from testing.builders.checkpoint import write_checkpoint
from testing.builders.identity import identity
from testing.fakes.downloads import NO_DOWNLOADS

NOT_VERIFIED = "rows are not verified, because the newest checkpoint does not identify its rows"
SPANNING_ROW = {"prompt": "the fu", "completion": "nction"}  # " function" is a token
ROW = {"prompt": "the ", "completion": "function"}


@dataclass
class RestartedJob:
    """A job whose attempts load the rows, claim the output and save a checkpoint."""

    folder: Path
    tokenizer: PreTrainedTokenizerFast
    uid: str = "ours"
    attempt: int = -1

    @property
    def file(self) -> Path:
        return self.folder / "rows.jsonl"

    @property
    def tokens(self) -> Path:
        return self.folder / "cache" / "tokens"

    def write_rows(self, *rows: dict[str, str]) -> None:
        self.file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))

    def run_attempt(self, *, overwrite: bool = False, **dataset_fields: Any) -> TrainingData:
        self.attempt += 1
        output = OutputFolder(self.folder / "output", identity(uid=self.uid, name="job", attempt=self.attempt))
        config = TokenizationConfig(
            tokenizer=copy.deepcopy(self.tokenizer),
            model_name="tiny",
            row_renderer=build_sft_renderer("assistant"),
            rules=RowRules(),
            seed=1,
            cache=self.folder / "cache",
            role=CacheRole.WRITER,
            send_heartbeat=lambda: None,
            downloads=NO_DOWNLOADS,
            attempt=self.attempt,
            trained_rows=output.read_trained_rows(overwrite=overwrite),
        )
        fields = {"train": [{"name": str(self.file)}], **dataset_fields}
        data = load_data(Dataset.model_validate(fields), config)
        output.claim(overwrite=overwrite, rows=data.row_identity)
        write_checkpoint(Checkpoints(output, keep_last=9, rows=data.row_identity), self.attempt + 1)
        return data

    def list_entries(self) -> list[Path]:
        return sorted(self.tokens.glob("[!.]*"))

    def turn_into_job_of_former_release(self, *, has_checksums: bool = False) -> Path:
        """Turn cache and checkpoints into those of a release without row identities; return the entry of the cache."""
        (current,) = self.list_entries()
        tokenizer_text = self.tokenizer.backend_tokenizer.to_str() + str(self.tokenizer.chat_template)
        settings: tuple[object, ...] = (
            tokenizer_text,
            None,
            build_sft_renderer("assistant").name,
            None,
            {},
            (None, "drop", "error"),
            None,
        )
        entry = current.rename(self.tokens / compute_cache_key([self.file], *settings))
        meta = json.loads((entry / "meta.json").read_text())
        meta["counted"]["notes"] = {}
        for key in ("checksum", "tokenization", *(() if has_checksums else ("records",))):
            del meta[key]
        write_json(entry / "meta.json", seal(meta) if has_checksums else meta)
        for file in (self.folder / "output" / "checkpoints").glob("step-*/manifest.json"):
            manifest = json.loads(file.read_text())
            del manifest["rows"], manifest["checksum"]
            write_json(file, seal(manifest))
        return entry


@pytest.fixture
def job(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> RestartedJob:
    job = RestartedJob(tmp_path, copy.deepcopy(tokenizer))
    job.write_rows(ROW, ROW)
    return job


def set_eos_token(job: RestartedJob, token: str) -> int:
    """Set the EOS token as a corrected tokenizer_config.json does, and return its id."""
    job.tokenizer.eos_token = token
    token_id = job.tokenizer.eos_token_id
    assert isinstance(token_id, int)
    return token_id


def read_input_ids(data: TrainingData) -> list[int]:
    ids: list[int] = data.train[0][0]["input_ids"].tolist()
    return ids


@pytest.mark.parametrize("uid", ["ours", "new"], ids=["restarted", "created again"])
@pytest.mark.parametrize("split", ["train", "eval"])
def test_rows_that_were_rewritten_between_attempts_are_refused_by_name(job: RestartedJob, split: str, uid: str) -> None:
    other = job.folder / "other.jsonl"
    other.write_text(job.file.read_text())
    fields: dict[str, Any] = (
        {"eval": [{"name": str(job.file)}], "train": [{"name": str(other)}]} if split == "eval" else {}
    )
    job.run_attempt(**fields)
    job.uid = uid
    job.write_rows(ROW, ROW, ROW)

    with pytest.raises(OutputError, match=rf"trained on other rows: {job.file} has changed; restore the rows, or"):
        job.run_attempt(**fields)

    job.write_rows(ROW, ROW)
    assert len(job.run_attempt(**fields).train) == 2


def test_overwrite_trains_on_the_new_rows_of_a_job_that_was_created_again(job: RestartedJob) -> None:
    job.run_attempt()
    job.uid, job.attempt = "new", -1
    job.write_rows(ROW, ROW, ROW)

    assert len(job.run_attempt(overwrite=True).train) == 3
    assert len(job.run_attempt(overwrite=True).train) == 3


def test_a_moved_modification_time_and_a_lost_cache_do_not_end_a_job(
    job: RestartedJob, capsys: pytest.CaptureFixture[str]
) -> None:
    job.run_attempt()
    os.utime(job.file, ns=(1, 1))

    job.run_attempt()

    assert len(job.list_entries()) == 2
    assert NOT_VERIFIED not in capsys.readouterr().out


def test_a_corrected_eos_token_leads_to_new_tokens(job: RestartedJob) -> None:
    wrong = set_eos_token(job, "<|im_end|>")
    assert read_input_ids(job.run_attempt())[-1] == wrong
    corrected = set_eos_token(job, "<|endoftext|>")

    with pytest.raises(OutputError, match="trained on other rows: the tokenizer has changed; restore the rows"):
        job.run_attempt()

    job.uid = "another"
    assert read_input_ids(job.run_attempt(overwrite=True))[-1] == corrected


def test_settings_of_the_last_call_of_the_tokenizer_do_not_change_the_key(job: RestartedJob) -> None:
    """The tokenizer removes truncation and padding of tokenizer.json when it is called; other ranks do not call it."""
    job.run_attempt()
    job.tokenizer.backend_tokenizer.enable_truncation(4)
    job.tokenizer.backend_tokenizer.enable_padding(pad_id=0, pad_token="<|endoftext|>")  # noqa: S106

    job.run_attempt()

    assert len(job.list_entries()) == 1


def test_tokens_that_the_tokenizer_adds_change_the_key(job: RestartedJob) -> None:
    job.run_attempt()
    token = ("<|im_start|>", job.tokenizer.convert_tokens_to_ids("<|im_start|>"))
    job.tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[token]
    )
    job.uid = "another"

    assert read_input_ids(job.run_attempt(overwrite=True))[0] == token[1]


@pytest.mark.parametrize("has_checksums", [False, True])
def test_a_job_that_began_with_a_former_release_keeps_its_rows(
    job: RestartedJob, has_checksums: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    job.write_rows(SPANNING_ROW)
    job.run_attempt()
    entry = job.turn_into_job_of_former_release(has_checksums=has_checksums)

    for is_verified in (False, has_checksums):
        assert job.run_attempt().train.folder == entry
        assert (NOT_VERIFIED in capsys.readouterr().out) != is_verified
    assert job.list_entries() == [entry]


def test_a_new_job_does_not_use_the_entry_of_a_former_release(job: RestartedJob) -> None:
    set_eos_token(job, "<|im_end|>")
    job.run_attempt()
    entry = job.turn_into_job_of_former_release(has_checksums=True)
    eos = set_eos_token(job, "<|endoftext|>")
    job.uid, job.attempt = "another", -1

    for _ in range(2):
        data = job.run_attempt(overwrite=True)
        assert data.train.folder != entry
        assert read_input_ids(data)[-1] == eos


def lose_entry_of_former_release(job: RestartedJob) -> None:
    job.run_attempt()
    job.turn_into_job_of_former_release().rename(job.folder / "lost")


def test_rows_are_tokenized_again_if_the_entry_of_a_former_release_is_lost(
    job: RestartedJob, capsys: pytest.CaptureFixture[str]
) -> None:
    lose_entry_of_former_release(job)

    assert len(job.run_attempt().train) == 2
    assert NOT_VERIFIED in capsys.readouterr().out


def test_plain_text_that_a_former_release_rendered_otherwise_is_refused_if_its_entry_is_lost(job: RestartedJob) -> None:
    job.write_rows(ROW, SPANNING_ROW)
    lose_entry_of_former_release(job)

    with pytest.raises(OutputError, match="computed other targets for plain text, and the rows that it tokenized are"):
        job.run_attempt()
