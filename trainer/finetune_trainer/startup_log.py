"""Log lines that rank 0 prints before the first step."""

from collections.abc import Iterable, Iterator

import torch
from transformers import PretrainedConfig

from finetune_api.batch import Batch
from finetune_api.v1alpha1.model_source import ModelSource
from finetune_trainer.data.batch_sampler import compute_padding_share, count_mixed_items
from finetune_trainer.data.collator import SequenceLayout
from finetune_trainer.data.length_stats import describe_lengths, describe_visual_tokens
from finetune_trainer.data.load import TrainingData
from finetune_trainer.data.packing import PackOrder
from finetune_trainer.data.row_filter import RowRules, RowStats
from finetune_trainer.distributed.devices import get_device_name
from finetune_trainer.distributed.process_group import get_device_backend
from finetune_trainer.distributed.rank_context import RankContext
from finetune_trainer.model.param_groups import ParameterCount, count_parameters
from finetune_trainer.model.switching_rope import find_switching_rope
from finetune_trainer.parallel.parallelism import describe_parallelism
from finetune_trainer.training_arguments import DeviceConfig
from finetune_trainer.training_plan import TrainingPlan
from finetune_trainer.vision.families import VisionFamily


def print_on_rank_zero(context: RankContext, lines: Iterable[str]) -> None:
    """Print the lines on rank 0 only."""
    if context.ranks.is_rank_zero:
        for line in lines:
            print(line, flush=True)


def describe_revision(source: ModelSource, *, commit: str | None) -> Iterator[str]:
    """Yield a log line about the commit of a model on the Hub; none for a path."""
    if commit is not None:
        place, branch = (" on ModelScope", "master") if source.hub == "modelscope" else ("", "main")
        yield f"model: {source.name}{place} at commit {commit} (revision {source.revision or branch})"


def describe_run(plan: TrainingPlan, context: RankContext, device_config: DeviceConfig) -> Iterator[str]:
    """Yield one log line each for job, batch, steps, parallelism, devices and learning rate."""
    spec, schedule = plan.spec, plan.schedule
    tuning = f"lora r={spec.lora.r} alpha={spec.lora.lora_alpha}" if spec.lora else "full"
    method = "sft" if spec.sft else "dpo"
    yield f"job {context.namespace}/{context.job}, attempt {context.attempt}: {method} ({tuning}) of {spec.model.name}"
    unit = "packs" if spec.dataset.packing else "samples"
    packs = " packs" if spec.dataset.packing else ""
    yield f"effective batch: {plan.batch}{packs} (per device x accumulation x ranks)"
    yield (
        f"steps: {schedule.total_steps} ({schedule.steps_per_epoch} per epoch of {schedule.samples} {unit},"
        f" {schedule.epochs:g} epochs)"
    )
    yield f"parallelism: {describe_parallelism(spec)}"
    if spec.training.torch_compile:
        yield "torch.compile: attention, MLP and norms of each layer are compiled in the first step"
    yield (
        f"devices: {context.ranks.world_size} x {get_device_name(device_config.device)}"
        f" on {context.ranks.node_count} node(s),"
        f" {get_device_backend(device_config.device)}, {str(device_config.dtype).removeprefix('torch.')}"
    )
    training = spec.training
    yield (
        f"learning rate: {plan.learning_rates}; {training.lr_scheduler_type},"
        f" {training.warmup_steps} warm-up steps, seed {training.seed}"
    )


def describe_data(data: TrainingData) -> Iterator[str]:
    """Yield log lines about the rows that were read and dropped, and about their lengths."""
    yield f"train: {len(data.train)} of {data.train.stats.rows} rows, {data.train.token_count} tokens"
    yield from describe_dropped_rows("train", data.train.stats, data.rules)
    yield from (f"train: {line}" for line in describe_lengths(data.train))
    if data.vision and data.train.media_store.modalities:
        yield from (f"train: {line}" for line in describe_visual_tokens(data.train, data.vision.visual_token_ids))
    if data.eval is None:
        return
    if data.is_eval_held_out:
        yield f"eval: {len(data.eval)} rows held out of train, {data.eval.token_count} tokens"
        return
    yield f"eval: {len(data.eval)} of {data.eval.stats.rows} rows, {data.eval.token_count} tokens"
    yield from describe_dropped_rows("eval", data.eval.stats, data.rules)


def describe_packing(data: TrainingData, batch: Batch, layout: SequenceLayout) -> Iterator[str]:
    """Yield log lines about pack utilization and the share of padding."""
    if isinstance(data.order, PackOrder):
        yield (
            f"packs: {len(data.order)} of up to {data.rules.max_length} tokens for {len(data.train)} rows,"
            f" {data.order.utilization:.1%} full"
        )
    if layout.padding_free:
        yield "padding: none"
    else:
        yield f"padding: {compute_padding_share(data.order, batch, layout.pad_multiple):.1%} of the tokens computed"


def describe_switching_rope(data: TrainingData, batch: Batch, config: PretrainedConfig) -> Iterator[tuple[str, str]]:
    """Yield a note on rows whose rotary embeddings depend on other rows, if there are any."""
    rope = find_switching_rope(config)
    if rope is None:
        return
    long_count, mixed_count = int((data.train.lengths > rope.limit).sum()), count_mixed_items(data.order, batch)
    if not (long_count if rope.is_dynamic else mixed_count):
        return
    mixed = f"{mixed_count} of {len(data.order)} {'packs' if isinstance(data.order, PackOrder) else 'rows'}"
    earlier = "; those of longer rows also depend on earlier micro-batches, which a resumed run does not repeat"
    yield (
        "rope",
        f"{rope.kind}: {long_count} of {len(data.train)} rows have more than {rope.limit} tokens, and change the"
        f" rotary embeddings of their micro-batches; in the first epoch, these contain {mixed} with fewer tokens, so"
        f" that losses depend on micro-batch size and number of ranks{earlier if rope.is_dynamic else ''}",
    )


def describe_dropped_rows(name: str, stats: RowStats, rules: RowRules) -> Iterator[str]:
    """Yield log lines about truncated, dropped and skipped rows and about ignored parts of rows, with examples."""
    categories = (
        (stats.cut, f"truncated to {rules.max_length} tokens"),
        (stats.too_long, f"dropped, longer than {rules.max_length} tokens"),
        (stats.nothing_to_learn, "dropped, no token to learn"),
        (stats.bad, "skipped, cannot be used"),
    )
    yield from (f"{name}: {examples.count} {category}: {examples}" for examples, category in categories if examples)
    yield from (f"{name}: {note} in {examples.count} rows: {examples}" for note, examples in stats.notes.items())


def describe_weights(model: torch.nn.Module, family: VisionFamily | None) -> Iterator[str]:
    """Yield the number of trained parameters, in total and, for a vision-language model, per component."""
    counts = count_parameters(model, family)
    total = ParameterCount(
        sum(count.trained for count in counts.values()), sum(count.total for count in counts.values())
    )
    tuning = "lora" if hasattr(model, "peft_config") else "full"
    parts = "".join(f"; {part} {count if count.trained else 'frozen'}" for part, count in counts.items())
    yield f"trainable parameters ({tuning}): {total}{parts if family else ''}"
