"""The datasets of a job, read, rendered and tokenised."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from finetune_api.v1alpha1 import Dataset, DatasetSource
from finetune_trainer.data.render import Renderer, Sample
from finetune_trainer.data.rows import Row, find_files, read_rows
from finetune_trainer.data.tokens import TokenDataset, cache_key, obtain_tokens
from finetune_trainer.errors import DatasetError
from finetune_trainer.files import explained


@dataclass(frozen=True)
class Data:
    """What to train on and, maybe, what to evaluate on."""

    train: TokenDataset
    eval: TokenDataset | None
    max_length: int | None


@dataclass(frozen=True)
class Method:
    """How a method makes sequences of a row; `name` with all that the result depends on, for the cache."""

    name: str
    render: Callable[[Renderer, Row], tuple[Sample, ...]]


@dataclass(frozen=True)
class Tokenizing:
    """With what, how long, where the result is kept and who writes it."""

    tokenizer: PreTrainedTokenizerBase
    model_name: str
    method: Method
    max_length: int | None
    cache: Path
    writes: bool
    alive: Callable[[], None]


def load_data(dataset: Dataset, how: Tokenizing) -> Data:
    train = _load(dataset.train, how, field="spec.dataset.train")
    evaluated = _load(dataset.eval, how, field="spec.dataset.eval") if dataset.eval else None
    return Data(train=train, eval=evaluated, max_length=how.max_length)


def _load(sources: Sequence[DatasetSource], how: Tokenizing, *, field: str) -> TokenDataset:
    files = [
        file for index, source in enumerate(sources) for file in find_files(source.name, field=f"{field}[{index}].name")
    ]
    described = how.tokenizer.backend_tokenizer.to_str() + str(how.tokenizer.chat_template)
    key = cache_key(files, tokenizer=described, method=how.method.name, max_length=how.max_length)
    with explained(how.cache):
        data = obtain_tokens(
            how.cache / "tokens" / key,
            lambda: _render_all(files, how),
            max_length=how.max_length,
            writes=how.writes,
            alive=how.alive,
        )
    if len(data) == 0:
        raise DatasetError(f"{field}: no sample is left to train on; {_why_empty(data, how.max_length)}")
    return data


def _render_all(files: Sequence[Path], how: Tokenizing) -> Iterator[tuple[Sample, ...]]:
    renderer = Renderer(how.tokenizer, model_name=how.model_name)
    for file in files:
        for row in read_rows(file):
            yield how.method.render(renderer, row)


def _why_empty(data: TokenDataset, max_length: int | None) -> str:
    counted = data.counted
    if counted.rows == 0:
        return "the files hold no rows"
    reasons = []
    if counted.nothing_to_learn:
        reasons.append(f"{counted.nothing_to_learn} have no token to learn")
    if counted.too_long:
        too_long = counted.dropped - counted.nothing_to_learn
        reasons.append(
            f"{too_long} are longer than {max_length} tokens (spec.dataset.maxLength): {', '.join(counted.too_long)}"
        )
    return f"of {counted.rows} rows {' and '.join(reasons)}"
