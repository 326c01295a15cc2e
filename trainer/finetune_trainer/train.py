"""What torchrun runs on every rank: spec -> data -> model -> trainer -> result, read from top to bottom."""

import os
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
import transformers
from torch.distributed.elastic.multiprocessing.errors import record

from finetune_api.batch import Batch
from finetune_api.rates import resolve_rates
from finetune_api.v1alpha1 import TrainerSpec
from finetune_trainer.alike import check_alike, describe_rank
from finetune_trainer.banner import describe_data, describe_order, describe_run, describe_weights
from finetune_trainer.callbacks import FollowEvaluations, RefuseNonFiniteLoss, StopWhenAsked, TellProgress
from finetune_trainer.checkpoint import Checkpoints, Found
from finetune_trainer.data.batches import Collate, Collator
from finetune_trainer.data.counted import Rules
from finetune_trainer.data.files import Downloads
from finetune_trainer.data.load import Data, Method, Tokenizing, check_same, load_data
from finetune_trainer.errors import TrainerError
from finetune_trainer.groups import check_rates
from finetune_trainer.hub import make_repository
from finetune_trainer.memory.limit import memory_of_a_rank
from finetune_trainer.memory.parts import Parts as MemoryParts
from finetune_trainer.methods.dpo import DpoTrainer, render_pair
from finetune_trainer.methods.exact import ExactTrainer, Parts
from finetune_trainer.methods.sft import SftTrainer, render_sample
from finetune_trainer.micro_batch import Kept, choose_by_forecast, choose_by_trial, circumstances, is_measurable
from finetune_trainer.model.load import Pretrained, describe_model, load_model, load_reference, pad_token_id
from finetune_trainer.monitor.expect import describe_expected, expect_memory
from finetune_trainer.monitor.writers import build_writers, chosen_writers
from finetune_trainer.output import Identity, Output
from finetune_trainer.place import Place
from finetune_trainer.publish import publish_result
from finetune_trainer.ranks import (
    check_world_size,
    choose_device,
    gather,
    join_process_group,
    leave_process_group,
    on_rank_zero,
)
from finetune_trainer.rehearsal import Rehearse
from finetune_trainer.reporting import Reporter
from finetune_trainer.settings import (
    Hardware,
    fingerprint,
    loader_processes,
    plan_batch,
    plan_eval_batch,
    plan_schedule,
    read_spec,
    training_arguments,
    with_batch,
)
from finetune_trainer.supervisor import contract
from finetune_trainer.supervisor.processes import die_with_parent
from finetune_trainer.vision.collate import SeeingCollator
from finetune_trainer.vision.freeze import trains_sight

BUILDERS: dict[str, Callable[[Parts], ExactTrainer]] = {
    "sft": SftTrainer,
    "dpo": DpoTrainer,
}  # a test compares the keys with METHODS


@record
def main() -> None:
    die_with_parent()
    place = Place.from_environment(os.environ)
    reporter = Reporter(place.run.heartbeats, rank=place.ranks.rank, local_rank=place.ranks.local_rank)
    transformers.utils.logging.disable_progress_bar()
    warnings.simplefilter("ignore", FutureWarning)  # between libraries whose versions we pin
    end = run(read_spec(place.config), place, reporter)
    leave_process_group()
    reporter.enter(end)


def run(spec: TrainerSpec, place: Place, reporter: Reporter) -> str:
    """Train, or go on training, up to the published result. Gives the phase it ended in: done or stopped."""
    check_world_size(place.ranks, promised=place.promised_world_size)
    batch = plan_batch(spec, world_size=place.ranks.world_size)
    output = Output(
        place.output, Identity(place.uid, place.namespace, place.job, place.attempt, fingerprint(spec, batch))
    )
    if output.is_finished():
        tell(place, [f"{output.result} is complete; nothing is left to do"])
        return contract.DONE
    output.check_owner(overwrite=spec.output.overwrite)
    writers = chosen_writers(spec.training)

    reporter.enter(contract.LOAD)
    device = choose_device(place.ranks)
    pretrained = describe_model(spec.model, device)
    data = load_data(spec.dataset, tokenizing(spec, pretrained, place, reporter))
    tell(place, describe_data(data))
    join_process_group(device, timeout_seconds=spec.training.ddp_timeout)
    check_same(gather(data.digest), per_node=place.ranks.local_world_size)
    if not spec.training.allow_mixed_hardware:
        check_alike(gather(describe_rank(device)), per_node=place.ranks.local_world_size)
    if spec.deepspeed:
        from finetune_trainer.parallel.zero import join_deepspeed  # takes seconds to import

        join_deepspeed()
    output.check_shared(on_rank_zero(lambda: output.claim(overwrite=spec.output.overwrite)))
    if push := spec.output.push_to_hub:
        on_rank_zero(lambda: make_repository(push))
    setting = Setting(place, reporter, Hardware(device, pretrained.dtype), pretrained, data, output)
    spec, models = settle_batch(spec, setting)
    expected = expect_memory(spec, pretrained, data, on_gpu=device.type == "cuda") if place.ranks.is_first else None
    trainer = assemble(spec, setting, models, expected_memory=expected)
    tell(place, describe_trainer(trainer, setting))
    tell(place, [describe_expected(expected)] if expected else [])
    found = on_rank_zero(trainer.parts.checkpoints.newest)
    if place.ranks.is_first:
        for writer in build_writers(writers, logs=output.logs, first_step=found.step):
            trainer.add_callback(writer)
    if not train(trainer, found, total_steps=trainer.args.max_steps):
        return contract.STOPPED
    publish_result(trainer, output, pretrained, title=f"{place.namespace}/{place.job}")
    return contract.DONE


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


def expect_with(spec: TrainerSpec, setting: Setting, batch: Batch) -> MemoryParts | TrainerError | None:
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


def describe_trainer(trainer: ExactTrainer, setting: Setting) -> Iterator[str]:
    parts = trainer.parts
    schedule = plan_schedule(parts.spec, parts.batch, samples=len(parts.data.order))
    yield from describe_run(parts.spec, setting.place, parts.batch, schedule, setting.hardware)
    yield from describe_order(parts.data, parts.batch)
    yield from describe_weights(parts.model, parts.family)


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


def train(trainer: ExactTrainer, found: Found, *, total_steps: int) -> bool:
    """From the checkpoint found, or from the start, to the end. False if the ranks were asked to stop before."""
    parts = trainer.parts
    first_step = found.step
    parts.reporter.start_at(first_step, of=total_steps, checkpoint=found.path.name if found.path else None)
    if parts.ranks.is_first:
        for problem in found.passed_over:
            print(f"checkpoint passed over: {problem}", flush=True)
        if found.path:
            print(f"resuming from {found.path}", flush=True)
    if found.path and trainer.was_done(found.path):
        trainer.load_checkpoint(found.path)
        return True
    # From here on the ranks draw dropout from generators of their own.
    transformers.set_seed((trainer.args.seed + parts.ranks.rank) % 2**32)
    trainer.train(resume_from_checkpoint=str(found.path) if found.path else None)
    return trainer.is_done or not trainer.stop_agreed


def collator(data: Data, pretrained: Pretrained, model: torch.nn.Module) -> Collate:
    pad_id = pad_token_id(pretrained.tokenizer)
    if pretrained.vision is None:
        return Collator(pad_id)
    always = data.shows_images or trains_sight(model, pretrained.vision.family)
    return SeeingCollator(pad_id, pretrained.vision, always=always)


def rows_of(spec: TrainerSpec) -> Method:
    """How the method turns rows into sequences."""
    if spec.sft is None:
        return Method("dpo", render_pair)
    return Method(f"sft {spec.sft.loss_on}", partial(render_sample, loss_on=spec.sft.loss_on))


def tokenizing(spec: TrainerSpec, pretrained: Pretrained, place: Place, reporter: Reporter) -> Tokenizing:
    return Tokenizing(
        tokenizer=pretrained.tokenizer,
        model_name=pretrained.name,
        method=rows_of(spec),
        rules=Rules(spec.dataset.max_length or pretrained.max_length, spec.dataset.overlong, spec.dataset.on_bad_row),
        seed=spec.training.seed,
        cache=place.cache,
        writes=place.ranks.local_rank == 0,
        alive=reporter.alive,
        downloads=Downloads(
            place.cache / "hub", place.uid, place.ranks.is_first, reporter.alive, spec.training.ddp_timeout
        ),
        vision=pretrained.vision,
    )


def tell(place: Place, lines: Iterable[str]) -> None:
    if place.ranks.is_first:
        for line in lines:
            print(line, flush=True)


if __name__ == "__main__":
    main()
