"""The trainer of a job, put together: models, micro-batches, and what listens to its steps."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from finetune_api.batch import Batch
from finetune_api.learning_rates import resolve_rates
from finetune_api.v1alpha1.job import TrainerSpec
from finetune_trainer.checkpoint.checkpoints import Checkpoints
from finetune_trainer.checkpoint.output_folder import Output
from finetune_trainer.data.batch_sampler import Collate, Collator
from finetune_trainer.data.load import Data
from finetune_trainer.data.vision_collator import SeeingCollator
from finetune_trainer.data_sources.media import Kind
from finetune_trainer.distributed.collectives import (
    on_rank_zero,
)
from finetune_trainer.distributed.heartbeat_writer import Reporter
from finetune_trainer.distributed.rank_context import Place
from finetune_trainer.errors import TrainerError
from finetune_trainer.memory.available import memory_of_a_rank
from finetune_trainer.memory.breakdown import Parts as MemoryParts
from finetune_trainer.memory.run_forecast import expect_memory
from finetune_trainer.methods.dpo import DpoTrainer
from finetune_trainer.methods.sft import SftTrainer
from finetune_trainer.model.load import Pretrained, load_model, load_reference, pad_token_id
from finetune_trainer.model.param_groups import check_rates
from finetune_trainer.startup_log import tell
from finetune_trainer.training.auto_batch_size import (
    Kept,
    choose_by_forecast,
    choose_by_trial,
    circumstances,
    is_measurable,
)
from finetune_trainer.training.base_trainer import ExactTrainer, Parts
from finetune_trainer.training.callbacks import FollowEvaluations, RefuseNonFiniteLoss, StopWhenAsked, TellProgress
from finetune_trainer.training.preflight import Rehearse
from finetune_trainer.training_arguments import (
    Hardware,
    loader_processes,
    plan_batch,
    plan_eval_batch,
    plan_schedule,
    training_arguments,
    with_batch,
)
from finetune_trainer.vision.freeze import trains_sight

BUILDERS: dict[str, Callable[[Parts], ExactTrainer]] = {
    "sft": SftTrainer,
    "dpo": DpoTrainer,
}  # a test compares the keys with METHODS


@dataclass(frozen=True)
class Setting:
    """What a trainer is built from besides the spec; the size of its micro-batches changes none of it."""

    place: Place
    reporter: Reporter
    hardware: Hardware
    pretrained: Pretrained
    data: Data
    output: Output


@dataclass(frozen=True)
class Models:
    """What learns, and what it is compared with where that is another one."""

    trained: torch.nn.Module
    reference: torch.nn.Module | None


def settle_batch(spec: TrainerSpec, setting: Setting) -> tuple[TrainerSpec, Models | None]:
    """The spec with numbers in the place of auto, and the models if they had to be loaded to find them."""
    if not spec.training.chooses_batch:
        return spec, None
    ranks, device, models = setting.place.ranks, setting.hardware.device, None
    smallest = plan_batch(spec, world_size=ranks.world_size)
    setting.reporter.chose(smallest.per_device)  # what is tried, should memory end here
    kept = Kept(setting.output, circumstances(spec, device, world_size=ranks.world_size))
    choice = on_rank_zero(lambda: kept.find(smallest))
    if choice is None and is_measurable(spec, device):
        trial = assemble(with_batch(spec, smallest), setting)
        choice = choose_by_trial(trial)
        models = Models(trial.model, trial.parts.reference)
    elif choice is None:
        expect, available = partial(expect_with, spec, setting), memory_of_a_rank(device)
        choice = on_rank_zero(lambda: choose_by_forecast(smallest, expect, available=available))
    chosen = choice
    on_rank_zero(lambda: kept.keep(chosen))
    setting.reporter.chose(chosen.batch.per_device)
    tell(setting.place, [f"perDeviceTrainBatchSize auto: {chosen.batch.per_device}, {chosen.why}"])
    return with_batch(spec, chosen.batch), models


def expect_with(spec: TrainerSpec, setting: Setting, batch: Batch) -> MemoryParts | TrainerError:
    on_gpu = setting.hardware.device.type == "cuda"
    return expect_memory(with_batch(spec, batch), setting.pretrained, setting.data, on_gpu=on_gpu)


def assemble(
    spec: TrainerSpec,
    setting: Setting,
    models: Models | None = None,
    *,
    expected_memory: MemoryParts | TrainerError | None = None,
) -> ExactTrainer:
    """Loads the models unless they are given."""
    place, pretrained, data, output = setting.place, setting.pretrained, setting.data, setting.output
    batch = plan_batch(spec, world_size=place.ranks.world_size)
    schedule = plan_schedule(spec, batch, samples=len(data.order))
    workers = loader_processes(spec, place.ranks)
    args = training_arguments(spec, batch, schedule, setting.hardware, folder=output.checkpoints, workers=workers)
    models = models or load_models(spec, pretrained)  # after the arguments: ZeRO-3 spreads it while it is read
    family, rates = pretrained.vision.family if pretrained.vision else None, resolve_rates(spec, batch)
    check_rates(models.trained, family, rates)
    return build_trainer(
        spec,
        Parts(
            spec=spec,
            model=models.trained,
            reference=models.reference,
            tokenizer=pretrained.tokenizer,
            data=data,
            collate=collator(data, pretrained, models.trained),
            family=family,
            rates=rates,
            batch=batch,
            eval_batch=plan_eval_batch(spec, batch),
            args=args,
            ranks=place.ranks,
            checkpoints=Checkpoints(output, keep=spec.training.save_total_limit),
            reporter=setting.reporter,
            stop_requested=place.run.stop_request.exists,
            expected_memory=expected_memory.total if isinstance(expected_memory, MemoryParts) else None,
        ),
    )


def load_models(spec: TrainerSpec, pretrained: Pretrained) -> Models:
    trained = load_model(spec, pretrained)
    return Models(trained, load_reference(pretrained) if spec.dpo and not spec.lora else None)


def build_trainer(spec: TrainerSpec, parts: Parts) -> ExactTrainer:
    method = next(name for name in BUILDERS if getattr(spec, name) is not None)  # the spec has exactly one
    trainer = BUILDERS[method](parts)
    trainer.add_callback(Rehearse(trainer))
    trainer.add_callback(RefuseNonFiniteLoss(trainer))
    trainer.add_callback(StopWhenAsked(trainer))
    trainer.add_callback(TellProgress(trainer, prints=parts.ranks.is_first))
    if trainer.comparison:
        trainer.add_callback(FollowEvaluations(trainer, trainer.comparison))
    return trainer


def collator(data: Data, pretrained: Pretrained, model: torch.nn.Module) -> Collate:
    pad_id = pad_token_id(pretrained.tokenizer)
    if pretrained.vision is None:
        return Collator(pad_id)
    always = data.shown or ((Kind.IMAGE,) if trains_sight(model, pretrained.vision.family) else ())
    return SeeingCollator(pad_id, pretrained.vision, always=always)
