"""The datasets of a job, read, rendered and tokenised."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, dataclass
from functools import cached_property
from hashlib import sha256
from pathlib import Path

import numpy as np
from torch.utils.data import Dataset as TorchDataset
from transformers import PreTrainedTokenizerBase

from finetune_api.v1alpha1.dataset import Dataset, DatasetSource
from finetune_trainer.atomic_files import explained
from finetune_trainer.data.chat_template import Renderer
from finetune_trainer.data.epoch_order import Item, Order, PackOrder, RowOrder
from finetune_trainer.data.packing import PackedDataset
from finetune_trainer.data.row_filter import Rendered, Rules
from finetune_trainer.data.token_cache import cache_key, obtain_tokens
from finetune_trainer.data.token_dataset import Features, TokenDataset
from finetune_trainer.data.train_test_split import hold_out
from finetune_trainer.data.vision_collator import SeeingDataset
from finetune_trainer.data_sources.media import Kind
from finetune_trainer.data_sources.readers import Row
from finetune_trainer.data_sources.source_files import EVAL, TRAIN, Downloads
from finetune_trainer.data_sources.sources import Source, find_sources, read_sources
from finetune_trainer.errors import ChatTemplateError, DatasetError, InvalidSpec, TrainerError
from finetune_trainer.vision.processor import Vision

Samples = TorchDataset[tuple[Features, ...]]


@dataclass(frozen=True)
class Data:
    """What to train on and, maybe, what to evaluate on."""

    train: TokenDataset
    order: Order
    eval: TokenDataset | None
    rules: Rules
    held_out: bool  # the rows of `eval` come from those of spec.dataset.train
    vision: Vision | None = None

    @property
    def samples(self) -> Samples:
        """What `order` takes: rows, or packs of them."""
        rows = self.seen(self.train)
        if not isinstance(self.order, PackOrder):
            return rows
        return PackedDataset(rows, self.vision.axes if self.vision and self.vision.family.has_axes else None)

    @property
    def digest(self) -> str:
        """Equal where the same rows were found; of their tokens only the number counts."""
        parts = (part.lengths.tobytes() for part in (self.train, self.eval) if part is not None)
        return sha256(b"|".join(parts)).hexdigest()[:16]

    @property
    def shown(self) -> frozenset[Kind]:
        """Whether there are images, and whether there are videos."""
        return frozenset().union(*(part.album.kinds for part in (self.train, self.eval) if part is not None))

    @cached_property
    def shows_most(self) -> Item | None:
        """The row, or the pack of the first epoch, with most visual tokens; None if nothing is shown at all."""
        if self.vision is None or not self.train.album.kinds:
            return None
        visual = self.train.count(self.vision.visual_tokens)
        if isinstance(self.order, PackOrder):
            return max(self.order.epoch(0).items, key=lambda pack: int(visual[np.atleast_1d(pack)].sum()))
        return int(np.argmax(visual))

    def seen(self, rows: TokenDataset) -> Samples:
        """The rows with the pixels of their images, if the model sees."""
        return SeeingDataset(rows, self.vision) if self.vision else rows


@dataclass(frozen=True)
class Method:
    """How a method makes sequences of a row; `name` with all that the result depends on, for the cache."""

    name: str
    render: Callable[[Renderer, Row], Rendered]


@dataclass(frozen=True)
class Tokenizing:
    """With what, by which rules, where the result is kept and who writes it."""

    tokenizer: PreTrainedTokenizerBase
    model_name: str
    method: Method
    rules: Rules
    seed: int  # of what is drawn: samples of sources, and the rows held out
    cache: Path
    writes: bool
    alive: Callable[[], None]
    downloads: Downloads
    vision: Vision | None = None


def load_data(dataset: Dataset, how: Tokenizing) -> Data:
    train = _load(dataset.train, how, field=TRAIN)
    evaluated = _load(dataset.eval, how, field=EVAL) if dataset.eval else None
    if dataset.split_dataset_ratio is not None:
        train, evaluated = hold_out(train, dataset.split_dataset_ratio, seed=how.seed)
    return Data(
        train=train,
        order=_order(dataset, train, how),
        eval=evaluated,
        rules=how.rules,
        held_out=dataset.split_dataset_ratio is not None,
        vision=how.vision,
    )


def check_same(digests: Sequence[str], *, per_node: int) -> None:
    """Ranks that read other rows would train on shares that do not make up the whole. Raises DatasetError."""
    for rank, digest in enumerate(digests):
        if digest != digests[0]:
            raise DatasetError(
                f"spec.dataset: node {rank // per_node} does not read the rows that node 0 reads; give all nodes the"
                " same files, from storage that they share"
            )


def _order(dataset: Dataset, train: TokenDataset, how: Tokenizing) -> Order:
    if not dataset.packing:
        return RowOrder(train.lengths, seed=how.seed)
    if how.vision and not how.vision.family.packs:
        raise InvalidSpec(
            f'spec.dataset.packing: model "{how.model_name}" reads images in both directions, and in doing so takes no'
            " notice of where a row of a pack ends; leave packing out"
        )
    assert dataset.max_length is not None  # the models see to it
    return PackOrder(train.lengths, room=dataset.max_length, seed=how.seed)


def _load(named: Sequence[DatasetSource], how: Tokenizing, *, field: str) -> TokenDataset:
    sources = find_sources(named, how.downloads, field=field)
    with explained(how.cache):
        data = obtain_tokens(
            how.cache / "tokens" / _key(sources, how),
            lambda: _render_all(sources, how),
            rules=how.rules,
            writes=how.writes,
            alive=how.alive,
        )
    if len(data) == 0:
        raise DatasetError(f"{field}: no sample is left; {_why_empty(data, how.rules)}")
    return data


def _key(sources: Sequence[Source], how: Tokenizing) -> str:
    drawn = [(len(source.files), source.rows) for source in sources]
    return cache_key(
        [file for source in sources for file in source.files],
        how.tokenizer.backend_tokenizer.to_str() + str(how.tokenizer.chat_template),
        how.method.name,
        how.vision.described if how.vision else None,
        astuple(how.rules),
        (drawn, how.seed) if any(source.rows for source in sources) else None,
    )


def _render_all(sources: Sequence[Source], how: Tokenizing) -> Iterator[Rendered | TrainerError]:
    """Every row that is taken, as often as it is, or what is wrong with it."""
    renderer = Renderer(how.tokenizer, model_name=how.model_name, vision=how.vision)
    for row, times in read_sources(sources, seed=how.seed):
        rendered = row if isinstance(row, DatasetError) else _render(renderer, row, how.method)
        for _ in range(times):
            yield rendered


def _render(renderer: Renderer, row: Row, method: Method) -> Rendered | TrainerError:
    try:
        return method.render(renderer, row)
    except (DatasetError, ChatTemplateError) as error:
        return error


def _why_empty(data: TokenDataset, rules: Rules) -> str:
    counted = data.counted
    if counted.rows == 0:
        return "the files hold no rows"
    reasons = []
    if counted.bad:
        reasons.append(f"{counted.bad.count} cannot be used: {counted.bad}")
    if counted.nothing_to_learn:
        reasons.append(f"{counted.nothing_to_learn.count} have no token to learn: {counted.nothing_to_learn}")
    if counted.too_long:
        reasons.append(
            f"{counted.too_long.count} are longer than {rules.max_length} tokens (spec.dataset.maxLength):"
            f" {counted.too_long}"
        )
    return f"of {counted.rows} rows {'; '.join(reasons)}"
