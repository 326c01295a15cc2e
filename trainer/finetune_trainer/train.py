"""What every rank does: spec -> data -> model -> trainer -> result, read from top to bottom."""

import os
import warnings
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch
import transformers
from torch.distributed.elastic.multiprocessing.errors import record

from finetune_api.v1alpha1.job import TrainerSpec
from finetune_supervisor import contract
from finetune_supervisor.launch.child_process import die_with_parent
from finetune_supervisor.liveness.stack_dump import answer_with_stack
from finetune_trainer.atomic_files import explained, storage_blamed
from finetune_trainer.build_trainer import Setting, assemble, settle_batch
from finetune_trainer.checkpoint.checkpoints import Found
from finetune_trainer.checkpoint.output_folder import Identity, Output
from finetune_trainer.data.load import Data, Method, Tokenizing, check_same, load_data
from finetune_trainer.data.row_filter import Rules
from finetune_trainer.data_sources.source_files import Downloads
from finetune_trainer.distributed.collectives import (
    check_world_size,
    choose_device,
    gather,
    join_process_group,
    leave_process_group,
    on_rank_zero,
)
from finetune_trainer.distributed.hardware_check import check_alike, describe_rank
from finetune_trainer.distributed.heartbeat_writer import Reporter
from finetune_trainer.distributed.rank_context import Place
from finetune_trainer.hubs import make_repository
from finetune_trainer.memory.run_forecast import describe_expected, expect_memory
from finetune_trainer.methods.dpo import render_pair
from finetune_trainer.methods.sft import render_sample
from finetune_trainer.metrics.trackers import build_writers, chosen_writers
from finetune_trainer.model.attention_backend import Attention, settle_attention, trial_of
from finetune_trainer.model.load import Pretrained, describe_model
from finetune_trainer.publish_result import publish_result
from finetune_trainer.startup_log import describe_data, describe_order, describe_run, describe_weights, tell
from finetune_trainer.training.base_trainer import ExactTrainer
from finetune_trainer.training_arguments import (
    Hardware,
    fingerprint,
    plan_batch,
    plan_schedule,
    read_spec,
)


@record
def main() -> None:
    die_with_parent()
    place = Place.from_environment(os.environ)
    answer_with_stack(place.run, place.ranks.local_rank)
    reporter = Reporter(place.run.heartbeats, rank=place.ranks.rank, local_rank=place.ranks.local_rank)
    transformers.utils.logging.disable_progress_bar()
    warnings.simplefilter("ignore", FutureWarning)  # between libraries whose versions we pin
    with storage_blamed():
        end = run(read_spec(place.config), place, reporter)
    reporter.enter(end)  # first: all is done, whatever becomes of a rank that takes its leave
    leave_process_group()


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
        from finetune_trainer.parallel.deepspeed_zero import join_deepspeed  # takes seconds to import

        join_deepspeed()
    output.check_shared(on_rank_zero(lambda: output.claim(overwrite=spec.output.overwrite)))
    if push := spec.output.push_to_hub:
        on_rank_zero(lambda: make_repository(push))
    attention = on_rank_zero(lambda: choose_attention(spec, pretrained, data, output, device))
    tell(place, [f"attention: {attention.name} ({attention.why})"])
    pretrained = replace(pretrained, attention=attention.name)
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


def choose_attention(
    spec: TrainerSpec, pretrained: Pretrained, data: Data, output: Output, device: torch.device
) -> Attention:
    """For the longest rows there are, or for the room of a pack."""
    longest = spec.dataset.max_length if spec.dataset.packing else int(data.train.lengths.max())
    assert longest is not None  # the spec has no packing without it
    trial = trial_of(spec, pretrained.config, pretrained.dtype, device, longest)
    with explained(output.root):
        output.assert_holder()  # it may write what it chose
        return settle_attention(spec, trial, output.checkpoints, sees=pretrained.vision is not None)


def describe_trainer(trainer: ExactTrainer, setting: Setting) -> Iterator[str]:
    parts = trainer.parts
    schedule = plan_schedule(parts.spec, parts.batch, samples=len(parts.data.order))
    yield from describe_run(parts.spec, setting.place, parts.batch, schedule, setting.hardware)
    yield from describe_order(parts.data, parts.batch)
    yield from describe_weights(parts.model, parts.family)


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
