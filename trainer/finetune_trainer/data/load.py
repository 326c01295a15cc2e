"""Reads, renders and tokenizes the training and evaluation data of a job."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import astuple, dataclass, field
from functools import cached_property
from hashlib import sha256
from importlib.metadata import distributions
from itertools import repeat
from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.data import Dataset as TorchDataset
from transformers import PreTrainedTokenizerBase

from finetune_api.v1alpha1.dataset import Dataset, DatasetSource
from finetune_trainer.atomic_files import translate_disk_errors
from finetune_trainer.chat_template.conversation_template import list_template_names
from finetune_trainer.chat_template.example_renderer import ExampleRenderer
from finetune_trainer.checkpoint.row_identity import RELEASE, ROWS, RowIdentity
from finetune_trainer.data.epoch_order import Item, ItemOrder, RowOrder
from finetune_trainer.data.late_skips import LateSkips, SkippingDataset
from finetune_trainer.data.packing import PackedDataset, PackOrder
from finetune_trainer.data.process_pool import map_in_order
from finetune_trainer.data.row_filter import RowRules
from finetune_trainer.data.row_rendering import RenderedRow, RowRenderer
from finetune_trainer.data.token_cache import CacheRole, compute_cache_key, load_or_tokenize, start_source_check
from finetune_trainer.data.token_dataset import Features, MultimodalDataset, TokenDataset
from finetune_trainer.data.train_test_split import hold_out_rows
from finetune_trainer.data_sources.media import Modality
from finetune_trainer.data_sources.readers import Row
from finetune_trainer.data_sources.source_files import EVAL_FIELD, TRAIN_FIELD
from finetune_trainer.data_sources.sources import RowSource, find_sources, read_sources
from finetune_trainer.errors import ChatTemplateError, DatasetError, InvalidSpec, TrainerError
from finetune_trainer.once_per_job import DownloadSettings
from finetune_trainer.vision.processor import VisionProcessor

SampleDataset = TorchDataset[tuple[Features, ...]]


@dataclass(frozen=True)
class TrainingData:
    """Tokenized training rows with their order, and optional evaluation rows."""

    train: TokenDataset
    order: ItemOrder
    eval: TokenDataset | None
    rules: RowRules
    is_eval_held_out: bool  # whether `eval` was split off from spec.dataset.train
    vision: VisionProcessor | None = None
    skips: LateSkips = field(default_factory=LateSkips)  # rows that turn out to be unusable during training
    source_check: Future[None] | None = None  # on rank 0; see `start_source_check`

    @property
    def samples(self) -> SampleDataset:
        """Training dataset, indexed by the items of `order`, which are rows or packs of rows."""
        rows = self.add_pixel_inputs(self.train)
        if not isinstance(self.order, PackOrder):
            return rows
        vision = self.vision
        return PackedDataset(rows, vision.compute_mrope_position_ids if vision and vision.family.uses_mrope else None)

    @property
    def digest(self) -> str:
        """Hash of all row lengths, to detect ranks that read different rows."""
        lengths = (dataset.lengths.tobytes() for dataset in (self.train, self.eval) if dataset is not None)
        return sha256(b"|".join(lengths)).hexdigest()[:16]

    @property
    def row_identity(self) -> RowIdentity:
        """Identity of the training and evaluation rows, which every checkpoint contains (decisions/547)."""
        rows = {"train": self.train.identity}
        if self.eval is not None and not self.is_eval_held_out:
            rows["eval"] = self.eval.identity
        return {f"{name} {key}": value for name, identity in rows.items() for key, value in identity.items()}

    @property
    def modalities(self) -> frozenset[Modality]:
        """Modalities other than text that occur in the rows."""
        datasets = (dataset for dataset in (self.train, self.eval) if dataset is not None)
        return frozenset().union(*(dataset.media_store.modalities for dataset in datasets))

    @cached_property
    def item_with_most_visual_tokens(self) -> Item | None:
        """Row, or pack of the first epoch, with the most visual tokens; None without images and videos."""
        if self.vision is None or not self.train.media_store.modalities:
            return None
        counts = self.train.count_token_ids(self.vision.visual_token_ids)
        if isinstance(self.order, PackOrder):
            return max(self.order.get_epoch(0).items, key=lambda pack: int(counts[np.atleast_1d(pack)].sum()))
        return int(np.argmax(counts))

    def add_pixel_inputs(self, rows: TokenDataset) -> SampleDataset:
        """Return a dataset of the rows, with pixel inputs if the model is a vision-language model."""
        if self.vision is None:
            return rows
        if self.rules.on_bad_row == "skip":
            return SkippingDataset(rows, self.vision, self.skips, "train" if rows is self.train else "eval")
        return MultimodalDataset(rows, self.vision)


@dataclass(frozen=True)
class TokenizationConfig:
    """Settings for tokenizing and caching rows."""

    tokenizer: PreTrainedTokenizerBase
    model_name: str
    row_renderer: RowRenderer
    rules: RowRules
    seed: int  # seed for drawing rows from sources and for the evaluation split
    cache: Path
    role: CacheRole
    send_heartbeat: Callable[[], None]
    downloads: DownloadSettings
    processes: int = 1  # processes that render and tokenise rows
    vision: VisionProcessor | None = None
    model_revision: str | None = None  # commit of a model on the Hub
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)  # variables for the chat template
    attempt: int = 0
    trained_rows: RowIdentity | None = None  # of the newest checkpoint; None without one
    rope_limit: int | None = None  # rows with more tokens have other rotary embeddings


def load_data(dataset: Dataset, config: TokenizationConfig) -> TrainingData:
    """Load the training and evaluation data, from the cache if possible.

    Raises: DatasetError, ChatTemplateError or InvalidSpec if the dataset cannot be used; HubUnavailable if a hub does
    not respond; OutputError if the cache cannot be written.
    """
    _check_template_kwargs(config)
    train = _load_rows(dataset.train, config, spec_field=TRAIN_FIELD)
    evaluation = _load_rows(dataset.eval, config, spec_field=EVAL_FIELD) if dataset.eval else None
    if dataset.split_dataset_ratio is not None:
        train, evaluation = hold_out_rows(train, dataset.split_dataset_ratio, seed=config.seed)
    return TrainingData(
        train=train,
        order=_build_order(dataset, train, config),
        eval=evaluation,
        rules=config.rules,
        is_eval_held_out=dataset.split_dataset_ratio is not None,
        vision=config.vision,
        source_check=start_source_check(filter(None, (train, evaluation))) if config.role is CacheRole.WRITER else None,
    )


def check_same_rows(digests: Sequence[str], *, ranks_per_node: int) -> None:
    """Check that all ranks read the same rows; otherwise rows would be repeated or omitted (decisions/508).

    digests: one per rank, in rank order. Raises: DatasetError with the number of the first differing node.
    """
    for rank, digest in enumerate(digests):
        if digest != digests[0]:
            node = rank // ranks_per_node
            raise DatasetError(
                f"spec.dataset: node {node} reads other rows than node 0; give all nodes the same files, on storage"
                " that they share"
            )


def _check_template_kwargs(config: TokenizationConfig) -> None:
    """Check that the chat template reads the variables of the spec."""
    template = config.tokenizer.chat_template
    texts = template.values() if isinstance(template, dict) else [template or ""]
    known = frozenset[str]().union(*map(list_template_names, texts))
    if unknown := config.template_kwargs.keys() - known:
        raise InvalidSpec(
            f'spec.dataset.chatTemplateKwargs: the chat template of model "{config.model_name}" has no variable'
            f" {min(unknown)}; correct its name, or remove it"
        )


def _build_order(dataset: Dataset, train: TokenDataset, config: TokenizationConfig) -> ItemOrder:
    if not dataset.packing:
        return RowOrder(train.lengths, seed=config.seed, length_limit=config.rope_limit)
    if config.vision and not config.vision.family.supports_packing:
        raise InvalidSpec(
            f'spec.dataset.packing: model "{config.model_name}" {config.vision.family.packing_problem}; leave packing'
            " out"
        )
    assert dataset.max_length is not None  # the API requires maxLength for packing
    return PackOrder(train.lengths, max_length=dataset.max_length, seed=config.seed, length_limit=config.rope_limit)


def _load_rows(
    dataset_sources: Sequence[DatasetSource], config: TokenizationConfig, *, spec_field: str
) -> TokenDataset:
    sources = find_sources(dataset_sources, config.downloads, spec_field=spec_field)
    files = [file for source in sources for file in source.files]
    entries, tokenization, former = config.cache / "tokens", _describe_tokenization(sources, config), None
    if config.trained_rows is not None:
        digest = config.trained_rows.get(f"{spec_field.rpartition('.')[2]} {ROWS}", "")
        former = entries / _build_former_cache_key(sources, config), digest
    with translate_disk_errors(config.cache):
        data = load_or_tokenize(
            entries / compute_cache_key(files, tokenization),
            lambda: _render_rows(sources, config),
            files=list(dict.fromkeys(files)),
            tokenization={**tokenization, RELEASE: _describe_release()},
            former=former,
            rules=config.rules,
            role=config.role,
            send_heartbeat=config.send_heartbeat,
            job_uid=config.downloads.job_uid,
            attempt=config.attempt,
        )
    if len(data) == 0:
        raise DatasetError(f"{spec_field}: no sample is left; {_explain_empty_dataset(data, config.rules)}")
    return data


def _describe_tokenization(sources: Sequence[RowSource], config: TokenizationConfig) -> dict[str, str]:
    """Return hashes of what tokens depend on apart from the files, by the names that error messages use."""
    tokenizer = config.tokenizer
    # The text before its added tokens contains padding and truncation of its last call, which affect no tokens.
    _, _, backend = tokenizer.backend_tokenizer.to_str().partition('"added_tokens"')
    special = (tokenizer.special_tokens_map, tokenizer.all_special_tokens, tokenizer.split_special_tokens)
    settings = {
        "tokenizer": (type(tokenizer).__name__, special, backend),
        "chat template": (tokenizer.chat_template, dict(config.template_kwargs)),
        "vision processor": config.vision.cache_description if config.vision else None,
        "commit of the model": config.model_revision,
        "selection of rows": (config.row_renderer.name, astuple(config.rules), _describe_draws(sources, config)),
    }
    return {name: sha256(json.dumps(value).encode()).hexdigest()[:16] for name, value in settings.items()}


def _describe_release() -> str:
    packages = ("finetune-operator", "transformers", "tokenizers")
    found = {name: package.version for name in packages for package in distributions(name=name)}
    return ", ".join(f"{name} {version}" for name, version in found.items())


def _describe_draws(sources: Sequence[RowSource], config: TokenizationConfig) -> object:
    row_counts = [(len(source.files), source.row_count) for source in sources]
    return (row_counts, config.seed) if any(source.row_count for source in sources) else None


def _build_former_cache_key(sources: Sequence[RowSource], config: TokenizationConfig) -> str:
    """Return the key of releases without row identities, which did not contain the special tokens."""
    return compute_cache_key(
        [file for source in sources for file in source.files],
        config.tokenizer.backend_tokenizer.to_str() + str(config.tokenizer.chat_template),
        config.model_revision,
        config.row_renderer.name,
        config.vision.cache_description if config.vision else None,
        dict(config.template_kwargs),
        astuple(config.rules),
        _describe_draws(sources, config),
    )


def _render_rows(sources: Sequence[RowSource], config: TokenizationConfig) -> Iterator[RenderedRow | TrainerError]:
    """Yield each rendered row, or its error, once per draw of the row."""
    example_renderer = ExampleRenderer(
        config.tokenizer,
        model_name=config.model_name,
        vision=config.vision,
        template_kwargs=config.template_kwargs,
    )

    def render(draw: tuple[Row | DatasetError, int]) -> tuple[RenderedRow | TrainerError, int]:
        row, repeats = draw
        try:
            return row if isinstance(row, DatasetError) else config.row_renderer.render(example_renderer, row), repeats
        except (DatasetError, ChatTemplateError) as error:
            return error, repeats

    draws = read_sources(sources, seed=config.seed)
    for rendered, repeats in map_in_order(render, draws, processes=config.processes):
        yield from repeat(rendered, repeats)


def _explain_empty_dataset(data: TokenDataset, rules: RowRules) -> str:
    """Return the reasons why all rows were dropped or skipped."""
    stats = data.stats
    if stats.rows == 0:
        return "the files contain no rows"
    reasons = []
    if stats.bad:
        reasons.append(f"{stats.bad.count} cannot be used: {stats.bad}")
    if stats.nothing_to_learn:
        reasons.append(f"{stats.nothing_to_learn.count} have no target token: {stats.nothing_to_learn}")
    if stats.too_long:
        reasons.append(
            f"{stats.too_long.count} are longer than {rules.max_length} tokens (spec.dataset.maxLength):"
            f" {stats.too_long}"
        )
    return f"of {stats.rows} rows {'; '.join(reasons)}"
