"""What rank 0 says before the first step."""

from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist

from finetune_api.batch import Batch
from finetune_api.learning_rates import resolve_rates
from finetune_api.v1alpha1.job import TrainerSpec
from finetune_trainer.data.batch_sampler import padding_share
from finetune_trainer.data.epoch_order import PackOrder
from finetune_trainer.data.length_stats import describe_lengths, describe_shown
from finetune_trainer.data.load import Data
from finetune_trainer.data.row_filter import Counted, Rules
from finetune_trainer.distributed.collectives import device_name
from finetune_trainer.distributed.rank_context import Place
from finetune_trainer.model.param_groups import Size, measure
from finetune_trainer.parallel.presets import describe_parallelism
from finetune_trainer.training_arguments import Hardware, Schedule
from finetune_trainer.vision.families import Family


def tell(place: Place, lines: Iterable[str]) -> None:
    """In the log of rank 0."""
    if place.ranks.is_first:
        for line in lines:
            print(line, flush=True)


def describe_run(
    spec: TrainerSpec, place: Place, batch: Batch, schedule: Schedule, hardware: Hardware
) -> Iterator[str]:
    how = f"lora r={spec.lora.r} alpha={spec.lora.lora_alpha}" if spec.lora else "full"
    method = "sft" if spec.sft else "dpo"
    yield f"job {place.namespace}/{place.job}, attempt {place.attempt}: {method} ({how}) of {spec.model.name}"
    samples = "packs" if spec.dataset.packing else "samples"
    of_packs = " packs" if spec.dataset.packing else ""
    yield f"effective batch: {batch}{of_packs} (per device x accumulation x ranks)"
    yield (
        f"steps: {schedule.total_steps} ({schedule.steps_per_epoch} per epoch of {schedule.samples} {samples},"
        f" {schedule.epochs:g} epochs)"
    )
    yield f"parallelism: {describe_parallelism(spec)}"
    yield (
        f"devices: {place.ranks.world_size} x {device_name(hardware.device)} on {place.ranks.nodes} node(s),"
        f" {dist.get_backend()}, {str(hardware.dtype).removeprefix('torch.')}"
    )
    training = spec.training
    yield (
        f"learning rate: {resolve_rates(spec, batch)}; {training.lr_scheduler_type}, {training.warmup_steps} warm-up"
        f" steps, seed {training.seed}"
    )


def describe_data(data: Data) -> Iterator[str]:
    counted = data.train.counted
    yield f"train: {len(data.train)} of {counted.rows} rows, {data.train.tokens} tokens"
    yield from describe_losses("train", data.train.counted, data.rules)
    yield from (f"train: {line}" for line in describe_lengths(data.train))
    if data.vision and data.train.album.kinds:
        yield from (f"train: {line}" for line in describe_shown(data.train, data.vision.visual_tokens))
    if data.eval is None:
        return
    if data.held_out:
        yield f"eval: {len(data.eval)} rows held out of train, {data.eval.tokens} tokens"
        return
    yield f"eval: {len(data.eval)} of {data.eval.counted.rows} rows, {data.eval.tokens} tokens"
    yield from describe_losses("eval", data.eval.counted, data.rules)


def describe_order(data: Data, batch: Batch) -> Iterator[str]:
    if isinstance(data.order, PackOrder):
        yield (
            f"packs: {len(data.order)} of up to {data.rules.max_length} tokens for {len(data.train)} rows,"
            f" {data.order.fullness:.1%} full"
        )
    yield f"padding: {padding_share(data.order, batch):.1%} of the tokens computed"


def describe_losses(name: str, counted: Counted, rules: Rules) -> Iterator[str]:
    """What was cut, dropped and skipped."""
    told = (
        (counted.cut, f"cut to {rules.max_length} tokens"),
        (counted.too_long, f"dropped, longer than {rules.max_length} tokens"),
        (counted.nothing_to_learn, "dropped, no token to learn"),
        (counted.bad, "skipped, cannot be used"),
    )
    yield from (f"{name}: {named.count} {what}: {named}" for named, what in told if named)


def describe_weights(model: torch.nn.Module, family: Family | None) -> Iterator[str]:
    """Of a model that sees by part, too."""
    sizes = measure(model, family)
    whole = Size(sum(size.trained for size in sizes.values()), sum(size.total for size in sizes.values()))
    how = "of lora" if hasattr(model, "peft_config") else "of the model itself"
    parts = "".join(f"; {part} {size if size.trained else 'frozen'}" for part, size in sizes.items())
    yield f"trainable parameters, {how}: {whole}{parts if family else ''}"
