"""Defines spec.dataset: training rows, evaluation rows and the handling of invalid rows."""

import re
from typing import Annotated, ClassVar, Literal

from pydantic import Field, StringConstraints

from finetune_api.v1alpha1.base import CelRule, CrossFieldRule, HubName, ModelWithRules, NonEmpty
from finetune_api.v1alpha1.chat_template_kwargs import ChatTemplateKwargs
from finetune_api.v1alpha1.name_types import Revision

_SAMPLED_NAME_PATTERN = "^[^#]+(#[1-9][0-9]{0,8})?$"


class DatasetSource(ModelWithRules):
    """One source of rows: files or a Hub dataset."""

    name: NonEmpty = Field(
        description="A .jsonl, .json, .csv or .parquet file, or a folder of them, on a mounted volume, or the id of a"
        " Hub dataset with such files; name#1000 draws 1000 rows at random with training.seed."
    )
    hub: HubName = Field(
        default="huggingface",
        description="Hub of an id: the Hugging Face Hub, with HF_TOKEN, or ModelScope, with MODELSCOPE_API_TOKEN.",
    )
    split: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_]+$", max_length=64)] | None = Field(
        default=None,
        description="For a folder or Hub dataset: use only files whose path contains this word, such as train (default:"
        " all files of a folder; in a Hub dataset, train for training and validation or test for evaluation, if paths"
        " contain these words).",
    )
    subset: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_.-]+$", max_length=64)] | None = Field(
        default=None, description="For a folder or Hub dataset: use only files in a subfolder with this name."
    )
    revision: Revision | None = Field(
        default=None, description="Branch, tag or commit of a Hub dataset (default: the main branch)."
    )

    rules: ClassVar[tuple[CrossFieldRule["DatasetSource"], ...]] = (
        CrossFieldRule.from_cel_rule(
            "sample size is a number",
            lambda source: re.fullmatch(_SAMPLED_NAME_PATTERN, source.name) is None,
            CelRule(
                f"self.name.matches('{_SAMPLED_NAME_PATTERN}')",
                "name: # must be followed by a number of rows, such as /data/train.jsonl#1000; a path must not contain"
                " #",
            ),
        ),
    )

    @property
    def path(self) -> str:
        """Path or Hub id, without the suffix for the number of rows."""
        return self.name.partition("#")[0]

    @property
    def rows(self) -> int | None:
        """Number of rows to draw, which can exceed the available rows; None uses each row once."""
        number = self.name.partition("#")[2]
        return int(number) if number else None


class Dataset(ModelWithRules):
    """The rows to train on, as chat messages or as columns that are converted to chat messages."""

    train: tuple[DatasetSource, ...] = Field(
        min_length=1, max_length=64, description="Sources of training rows, read in order."
    )
    eval: tuple[DatasetSource, ...] = Field(default=(), max_length=64, description="Sources of evaluation rows.")
    split_dataset_ratio: float | None = Field(
        default=None,
        gt=0,
        lt=1,
        description="Fraction of the training rows held out for evaluation, instead of eval; drawn with training.seed.",
    )
    max_length: int | None = Field(
        default=None,
        ge=1,
        le=10_000_000,
        description="Maximum length of a sample in tokens (default: the model's maximum number of positions).",
    )
    overlong: Literal["drop", "truncate", "error"] = Field(
        default="drop",
        description="Samples longer than maxLength: drop and count them, truncate them at the end, or fail.",
    )
    on_bad_row: Literal["error", "skip"] = Field(
        default="error",
        description="Invalid rows: fail, or skip them and report their number and locations in the log.",
    )
    chat_template_kwargs: ChatTemplateKwargs = Field(
        default={},
        description="Variables for the chat template of the model, such as enable_thinking: false; a column"
        " chat_template_kwargs of a row overrides them. At most 16; values are booleans, numbers or strings.",
    )
    packing: bool = Field(
        default=False,
        description="Pack rows into sequences of up to maxLength tokens, without attention between rows; only with sft."
        " perDeviceTrainBatchSize then counts packed sequences.",
    )
    num_workers: int | None = Field(
        default=None,
        ge=0,
        le=64,
        description="Data loader processes per rank (default: CPUs of the container / ranks - 1, from 1 to 8).",
    )

    rules: ClassVar[tuple[CrossFieldRule["Dataset"], ...]] = (
        CrossFieldRule.from_cel_rule(
            "one evaluation",
            lambda dataset: bool(dataset.eval) and dataset.split_dataset_ratio is not None,
            CelRule(
                "!(has(self.splitDatasetRatio) && has(self.eval) && self.eval.size() > 0)",
                "eval and splitDatasetRatio exclude each other; set one of them",
            ),
        ),
        CrossFieldRule.from_cel_rule(
            "packing has a length",
            lambda dataset: dataset.packing and dataset.max_length is None,
            CelRule(
                "!(has(self.packing) && self.packing) || has(self.maxLength)",
                "packing needs maxLength, the length of a pack in tokens; set it to what fits into memory",
            ),
        ),
    )

    @property
    def has_evaluation(self) -> bool:
        """Whether the dataset has evaluation rows."""
        return bool(self.eval) or self.split_dataset_ratio is not None
