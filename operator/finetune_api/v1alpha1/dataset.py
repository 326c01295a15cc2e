"""The dataset of a job: which rows, and what becomes of those that do not fit."""

import re
from typing import Annotated, Literal, Self

from pydantic import ConfigDict, Field, StringConstraints, model_validator

from finetune_api.v1alpha1.base import Model, NonEmpty, validations

_SAMPLED = "^[^#]+(#[1-9][0-9]{0,8})?$"
_SAMPLED_MESSAGE = "after # stands how many rows are taken, such as /data/train.jsonl#1000; a path may hold no #"
PACKING_NEEDS_SFT = (
    "dataset.packing works with sft alone: dpo compares the two sequences of a row, and a pack has many rows; leave"
    " packing out"
)
_PACKING_NEEDS_LENGTH = "packing needs maxLength, which is the size of a pack; set it to what fits in memory"


class DatasetSource(Model):
    """One set of rows."""

    name: NonEmpty = Field(
        description="A .jsonl, .json, .csv or .parquet file, or a folder of them, on a mounted volume, or the id of a"
        " Hub dataset that holds such files; name#1000 takes 1000 rows of it, drawn by training.seed."
    )
    split: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_]+$", max_length=64)] | None = Field(
        default=None,
        description="Of a folder or Hub dataset only files whose path says this word, such as train (default: all files"
        " of a folder; of a Hub dataset train to train on, validation or test to evaluate on, where paths say so).",
    )
    subset: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_.-]+$", max_length=64)] | None = Field(
        default=None, description="Of a folder or Hub dataset only files in a folder of this name."
    )
    revision: NonEmpty | None = Field(
        default=None, description="Branch, tag or commit of a Hub dataset (default: main)."
    )

    model_config = ConfigDict(
        json_schema_extra=validations((f"self.name.matches('{_SAMPLED}')", f"name: {_SAMPLED_MESSAGE}"))
    )

    @property
    def path(self) -> str:
        """Without the number of rows."""
        return self.name.partition("#")[0]

    @property
    def rows(self) -> int | None:
        """How many are taken, less or more than there are; None takes each once."""
        number = self.name.partition("#")[2]
        return int(number) if number else None

    @model_validator(mode="after")
    def _sample_is_a_number(self) -> Self:
        if not re.fullmatch(_SAMPLED, self.name):
            raise ValueError(f"name: {_SAMPLED_MESSAGE}")
        return self


class Dataset(Model):
    """The rows to train on: chat messages, or columns that stand for them."""

    train: tuple[DatasetSource, ...] = Field(min_length=1, max_length=64, description="Training rows, read in order.")
    eval: tuple[DatasetSource, ...] = Field(default=(), max_length=64, description="Rows for the evaluation loss.")
    split_dataset_ratio: float | None = Field(
        default=None,
        gt=0,
        lt=1,
        description="Share of the training rows held out for the evaluation loss, instead of eval; drawn by"
        " training.seed.",
    )
    max_length: int | None = Field(
        default=None,
        ge=1,
        le=10_000_000,
        description="Longest sample in tokens (default: what the model has positions for).",
    )
    overlong: Literal["drop", "truncate", "error"] = Field(
        default="drop",
        description="Samples longer than maxLength: left out and counted, cut to their beginning, or an error.",
    )
    on_bad_row: Literal["error", "skip"] = Field(
        default="error", description="Rows that cannot be used: an error, or left out, counted and named in the log."
    )
    packing: bool = Field(
        default=False,
        description="Join rows into sequences of up to maxLength tokens that see nothing of each other; with sft."
        " perDeviceTrainBatchSize then counts these.",
    )
    num_workers: int | None = Field(
        default=None, ge=0, le=64, description="Loader processes per rank (default: cores / ranks - 1, 1 to 8)."
    )

    model_config = ConfigDict(
        json_schema_extra=validations(
            (
                "!(has(self.splitDatasetRatio) && has(self.eval) && self.eval.size() > 0)",
                "eval and splitDatasetRatio exclude each other; set one of them",
            ),
            ("!(has(self.packing) && self.packing) || has(self.maxLength)", _PACKING_NEEDS_LENGTH),
        )
    )

    @property
    def evaluates(self) -> bool:
        return bool(self.eval) or self.split_dataset_ratio is not None

    @model_validator(mode="after")
    def _one_evaluation(self) -> Self:
        if self.eval and self.split_dataset_ratio is not None:
            raise ValueError("eval and splitDatasetRatio exclude each other; set one of them")
        return self

    @model_validator(mode="after")
    def _packs_have_a_size(self) -> Self:
        if self.packing and self.max_length is None:
            raise ValueError(_PACKING_NEEDS_LENGTH)
        return self
