"""Collect the content of the model card from the trainer, and write the card beside the result."""

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from finetune_api.v1alpha1.dataset import DatasetSource
from finetune_api.v1alpha1.job import TrainerSpec
from finetune_supervisor.contract import to_camel
from finetune_trainer.card_marker import CARD_FILE, is_generated
from finetune_trainer.chat_template.samples import SPANNING_TOKEN
from finetune_trainer.data.load import TrainingData
from finetune_trainer.data.token_dataset import TokenDataset
from finetune_trainer.data_sources.media import Modality
from finetune_trainer.data_sources.source_files import is_hub_dataset
from finetune_trainer.foreign_files import ForbiddenFile, open_foreign
from finetune_trainer.model.load import ModelDescription, is_path
from finetune_trainer.model_card.card import CardContent, DataFacts, render_card
from finetune_trainer.model_card.markdown import as_code
from finetune_trainer.model_card.usage_code import LoadableResult
from finetune_trainer.parallel.parallelism import describe_parallelism
from finetune_trainer.report.environment import describe_device, list_versions
from finetune_trainer.report.run_summary import RunSummary
from finetune_trainer.training.base_trainer import GlobalMeanTrainer
from finetune_trainer.training_plan import NOT_IN_FINGERPRINT
from finetune_trainer.vision.towers import choose_auto_class

_PROJECT = "[finetune-operator](https://github.com/finetune-operator/finetune-operator)"
_METHODS = {"sft": "supervised fine-tuning (SFT)", "dpo": "direct preference optimization (DPO)"}


def write_model_card(content: CardContent, folder: Path, *, published: Path) -> None:
    """Write README.md into the folder, or keep the card of the published result if somebody has edited that.

    published: folder of the result that an earlier attempt published; it may not exist.
    """
    text = render_card(content)
    with suppress(FileNotFoundError, NotADirectoryError, ForbiddenFile):
        with open_foreign(published / CARD_FILE, (published.resolve(),)) as file:
            existing = file.read().decode("utf-8", "replace")
        if not is_generated(existing):
            print(f"{published / CARD_FILE} was written or edited by somebody else and is kept", flush=True)
            text = existing
    (folder / CARD_FILE).write_text(text, encoding="utf-8")


def collect_card_content(
    trainer: GlobalMeanTrainer, model_description: ModelDescription, summary: RunSummary, *, title: str
) -> CardContent:
    """Collect the content of the model card of a trained model."""
    inputs, data = trainer.inputs, trainer.inputs.data
    spec = inputs.plan.spec
    method, tuning = "sft" if spec.sft else "dpo", ("lora",) if spec.lora else ()
    push = spec.output.push_to_hub
    has_vision = model_description.vision is not None
    return CardContent(
        title=title,
        result=LoadableResult(
            auto_class=choose_auto_class(model_description.config).__name__,
            base_model=model_description.name,
            base_revision=model_description.revision,
            is_adapter=spec.lora is not None,
            has_vision=has_vision,
            location=push.repo if push and push.hub == "huggingface" else ".",
        ),
        is_base_on_hub=not is_path(model_description.name),
        pipeline_tag=_choose_pipeline_tag(model_description, data),
        tags=("finetune-operator", method, *tuning),
        hub_datasets=_list_hub_datasets((*spec.dataset.train, *spec.dataset.eval)),
        description=_describe_result(spec, model_description, method),
        summary=summary,
        data=tuple(_describe_data(spec, data)),
        settings=_describe_settings(trainer, model_description),
        log_history=trainer.state.log_history,
        environment={
            "devices": f"{inputs.ranks.world_size} x {describe_device()} on {inputs.ranks.node_count} node(s)",
            **list_versions(),
        },
    )


def _choose_pipeline_tag(model_description: ModelDescription, data: TrainingData) -> str | None:
    """Return the task of the Hub; None for the text part of a model with other parts, which has no task of its own."""
    if model_description.vision is not None:
        return "video-text-to-text" if data.modalities == {Modality.VIDEO} else "image-text-to-text"
    return None if model_description.frozen_modules else "text-generation"


def _list_hub_datasets(sources: Iterable[DatasetSource]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(source.path for source in sources if is_hub_dataset(source)))


def _describe_result(spec: TrainerSpec, model_description: ModelDescription, method: str) -> str:
    """Return a sentence with the base model and the method."""
    kind = "A LoRA adapter for" if spec.lora else "All weights of"
    revision = f" at revision {as_code(model_description.revision)}" if model_description.revision else ""
    start = f", starting from the adapter {as_code(spec.lora.adapter)}" if spec.lora and spec.lora.adapter else ""
    base = as_code(model_description.name)
    return f"{kind} {base}{revision}, trained with {_METHODS[method]}{start} by {_PROJECT}."


def _describe_data(spec: TrainerSpec, data: TrainingData) -> Iterator[DataFacts]:
    late = Counter(name for name, _ in data.skips.rows)
    counts = _count_rows(data.train, late["train"])
    yield DataFacts("Training", _name_sources(spec.dataset.train), counts, data.train.files)
    if data.eval is not None and data.is_eval_held_out:
        counts = {"rows": f"{len(data.eval)}, held out of the training data", "tokens": str(data.eval.token_count)}
        yield DataFacts("Evaluation", _name_sources(spec.dataset.train), counts, ())
    elif data.eval is not None:
        counts = _count_rows(data.eval, late["eval"])
        yield DataFacts("Evaluation", _name_sources(spec.dataset.eval), counts, data.eval.files)


def _name_sources(sources: Iterable[DatasetSource]) -> tuple[str, ...]:
    """Return the names of the sources with their subset, split and revision."""
    options = ("subset", "split", "revision")
    return tuple(
        " ".join((source.name, *(f"{key} {value}" for key in options if (value := getattr(source, key)))))
        for source in sources
    )


def _count_rows(data: TokenDataset, late_skip_count: int) -> dict[str, str]:
    stats = data.stats
    left_out = {
        "too long": stats.too_long.count,
        "without a token to learn": stats.nothing_to_learn.count,
        "invalid": stats.bad.count + late_skip_count,
    }
    dropped = ", ".join(f"{count} {reason}" for reason, count in left_out.items() if count)
    return {
        "rows": f"{len(data)} of {stats.rows}",
        **({"left out": dropped} if dropped else {}),
        **({"truncated": str(stats.cut.count)} if stats.cut else {}),
        **{f"rows where {note}": str(rows.count) for note, rows in stats.notes.items() if note == SPANNING_TOKEN},
        "tokens": str(data.token_count),
        "digest of the tokens": data.content_digest or "none, because a release without checksums tokenized the rows",
    }


def _describe_settings(trainer: GlobalMeanTrainer, model_description: ModelDescription) -> dict[str, str]:
    """Return the settings that determine the result: derived values first, then those of the spec."""
    plan, schedule = trainer.inputs.plan, trainer.inputs.plan.schedule
    derived = {
        "steps": f"{trainer.state.global_step} of {schedule.total_steps}, {schedule.steps_per_epoch} per epoch",
        "learning rate": str(plan.learning_rates),
        "precision": str(model_description.dtype).removeprefix("torch."),
        "attention": model_description.attention,
        "parallelism": describe_parallelism(plan.spec),
        **trainer.inputs.notes,
    }
    included = {"sft", "dpo", "lora", "training"}
    spec = plan.spec.model_dump(mode="json", include=included, exclude_none=True)
    spec["training"] = {name: value for name, value in spec["training"].items() if name not in NOT_IN_FINGERPRINT}
    dataset = plan.spec.dataset.model_dump(
        mode="json",
        include={"max_length", "overlong", "on_bad_row", "packing", "chat_template_kwargs"},
        exclude_none=True,
    )
    return derived | dict(_flatten({**spec, "dataset": dataset}))


def _flatten(fields: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for name, value in fields.items():
        path = f"{prefix}{to_camel(name)}"
        if isinstance(value, Mapping) and value:
            yield from _flatten(value, f"{path}.")
        else:
            yield path, value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
