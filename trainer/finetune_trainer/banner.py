"""What rank 0 says before the first step."""

from collections.abc import Iterator

import torch
import torch.distributed as dist

from finetune_api.batch import Batch
from finetune_api.v1alpha1 import FineTuneJobSpec
from finetune_trainer.data.load import Data
from finetune_trainer.place import Place
from finetune_trainer.settings import Hardware, Schedule, learning_rate


def describe_run(
    spec: FineTuneJobSpec, place: Place, batch: Batch, schedule: Schedule, hardware: Hardware
) -> Iterator[str]:
    how = f"lora r={spec.lora.r} alpha={spec.lora.lora_alpha}" if spec.lora else "full"
    method = "sft" if spec.sft else "dpo"
    yield f"job {place.namespace}/{place.job}, attempt {place.attempt}: {method} ({how}) of {spec.model.name}"
    yield f"effective batch: {batch} (per device x accumulation x ranks)"
    yield (
        f"steps: {schedule.total_steps} ({schedule.steps_per_epoch} per epoch of {schedule.samples} samples,"
        f" {schedule.epochs:g} epochs)"
    )
    where = torch.cuda.get_device_name(hardware.device) if hardware.device.type == "cuda" else "cpu"
    yield (
        f"devices: {place.ranks.world_size} x {where} on {place.ranks.nodes} node(s), {dist.get_backend()},"
        f" {str(hardware.dtype).removeprefix('torch.')}"
    )
    training = spec.training
    yield (
        f"learning rate: {learning_rate(spec):g} {training.lr_scheduler_type}, {training.warmup_steps} warm-up steps,"
        f" seed {training.seed}"
    )


def describe_data(data: Data) -> Iterator[str]:
    for name, dataset in (("train", data.train), ("eval", data.eval)):
        if dataset is None:
            continue
        counted = dataset.counted
        yield f"{name}: {counted.kept} of {counted.rows} rows, {counted.tokens} tokens"
        if counted.too_long:
            yield f"{name}: dropped, longer than {data.max_length} tokens: {', '.join(counted.too_long)}"
        if counted.nothing_to_learn:
            yield f"{name}: dropped, no token to learn: {counted.nothing_to_learn} rows"


def describe_weights(model: torch.nn.Module) -> str:
    counts = [(parameter.numel(), parameter.requires_grad) for parameter in model.parameters()]
    trainable, total = sum(n for n, learns in counts if learns), sum(n for n, _ in counts)
    return f"trainable parameters: {trainable:,} of {total:,} ({trainable / total:.2%})"
