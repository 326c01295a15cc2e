"""Main program of a rank. `run` contains the steps from the spec to the published result."""

import os
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import replace
from math import floor
from pathlib import Path

import torch
import transformers
from torch.distributed.elastic.multiprocessing.errors import record

from finetune_api.v1alpha1.job import TrainerSpec
from finetune_supervisor import contract
from finetune_supervisor.launch.child_process import die_with_parent
from finetune_supervisor.liveness.stack_dump import register_stack_dump
from finetune_supervisor.messages import Degradation
from finetune_trainer.atomic_files import check_no_links
from finetune_trainer.build_trainer import TrainingSetup, assemble_trainer, resolve_auto_batch_size
from finetune_trainer.cgroup import Cgroup
from finetune_trainer.checkpoint.checkpoints import ResumePoint
from finetune_trainer.checkpoint.output_folder import Identity, OutputFolder
from finetune_trainer.checkpoint.row_identity import RowIdentity
from finetune_trainer.cluster_check.check import check_cluster, measure_foreign_memory
from finetune_trainer.cluster_check.degradations import describe_compute
from finetune_trainer.cluster_check.nccl_log import enable_nccl_log
from finetune_trainer.data.load import TokenizationConfig, TrainingData, check_same_rows, load_data
from finetune_trainer.data.row_filter import RowRules
from finetune_trainer.data.row_rendering import select_row_renderer
from finetune_trainer.data.token_cache import CacheRole
from finetune_trainer.distributed.collectives import all_gather_objects, run_on_rank_zero
from finetune_trainer.distributed.devices import choose_device
from finetune_trainer.distributed.hardware_check import check_same_hardware, describe_rank_hardware
from finetune_trainer.distributed.heartbeat_writer import HeartbeatWriter
from finetune_trainer.distributed.process_group import (
    destroy_process_group,
    get_device_backend,
    init_process_group,
)
from finetune_trainer.distributed.rank_context import RankContext, Ranks, check_world_size
from finetune_trainer.errors import Degraded
from finetune_trainer.hubs import create_repository
from finetune_trainer.memory.run_forecast import forecast_rank_memory, format_rank_forecast
from finetune_trainer.metrics.recorder_threads import RecorderThreads
from finetune_trainer.metrics.trackers import build_tracker, select_trackers
from finetune_trainer.model.attention_backend import (
    AttentionChoice,
    build_attention_trial,
    describe_linear_attention,
    describe_slow_linear_attention,
    disable_cudnn_attention,
    select_attention,
)
from finetune_trainer.model.download import choose_model_downloads, download_model
from finetune_trainer.model.load import ModelDescription, describe_model
from finetune_trainer.model.revision import pin_revision
from finetune_trainer.model.switching_rope import find_switching_rope
from finetune_trainer.once_per_job import DownloadSettings
from finetune_trainer.publish_result import publish_result
from finetune_trainer.read_spec import read_spec
from finetune_trainer.report.attempt_log import (
    ATTEMPT_FILE,
    AttemptEntry,
    AttemptLog,
    AttemptLogCallback,
    describe_repairable_settings,
)
from finetune_trainer.secret_variables import forget_secrets
from finetune_trainer.startup_log import (
    describe_data,
    describe_packing,
    describe_revision,
    describe_run,
    describe_weights,
    print_on_rank_zero,
)
from finetune_trainer.storage_faults import raise_storage_faults
from finetune_trainer.training.base_trainer import GlobalMeanTrainer
from finetune_trainer.training.trainer_inputs import TrainerInputs
from finetune_trainer.training_arguments import DeviceConfig, count_cpus
from finetune_trainer.training_plan import plan_training


@record
def main() -> None:
    """Run the training of this rank; torchrun's `record` writes exceptions to the error file of the rank."""
    die_with_parent()
    context = RankContext.from_environment(os.environ)
    register_stack_dump(context.run, context.ranks.local_rank)
    if not context.ranks.is_rank_zero:
        forget_secrets(is_loaded=False)
    heartbeat = HeartbeatWriter(context.run.heartbeats, rank=context.ranks.rank, local_rank=context.ranks.local_rank)
    transformers.utils.logging.disable_progress_bar()
    # All library versions are pinned, so warnings about future versions are irrelevant.
    warnings.simplefilter("ignore", FutureWarning)
    with raise_storage_faults():
        final_phase = run(read_spec(context.config), context, heartbeat)
    heartbeat.enter_phase(final_phase)  # report the phase before destroying the process group, which may hang
    destroy_process_group()


def run(spec: TrainerSpec, context: RankContext, heartbeat: HeartbeatWriter) -> str:
    """Train, or resume training, and publish the result. Return the final phase: done or stopped."""
    # Check the world size and the owner of the output; return if the result is already complete.
    check_world_size(context.ranks, planned_world_size=context.planned_world_size)
    plan = plan_training(spec, world_size=context.ranks.world_size)
    output = OutputFolder(
        context.output, Identity(context.uid, context.namespace, context.job, context.attempt, plan.fingerprint)
    )
    if output.is_finished():
        print_on_rank_zero(context, [f"{output.result} is complete; nothing is left to do"])
        return contract.DONE
    check_output(output, context.cache, overwrite=spec.output.overwrite)
    trackers = select_trackers(spec.training)

    # Load config, tokenizer and data, which needs no process group.
    heartbeat.enter_phase(contract.LOAD)
    device = choose_device(context.ranks, planned_gpus=context.planned_gpus, other_gpus=context.other_gpus)
    foreign_bytes = measure_foreign_memory(device)
    downloads = build_download_settings(spec, context, heartbeat)
    model = pin_revision(spec.model, downloads)
    heartbeat.record_progress(replace(heartbeat.progress, model_revision=model.revision))
    print_on_rank_zero(context, describe_revision(spec.model, commit=model.revision))
    local_model = download_model(model, choose_model_downloads(model, context, downloads))
    model_description = describe_model(local_model, device, is_downloaded=True)
    trained_rows = output.read_trained_rows(overwrite=spec.output.overwrite)
    data = load_data(spec.dataset, build_tokenization_config(spec, model_description, context, downloads, trained_rows))
    plan = plan.with_samples(len(data.order))
    print_on_rank_zero(context, describe_data(data))

    # Join the process group, and check that all ranks have the same data and hardware.
    nccl_log = enable_nccl_log(context.run.path, context.ranks.local_rank)
    connect_ranks(spec, context.ranks, device, data)

    # Check GPUs and network, which fails faster than the first step.
    cluster = check_cluster(
        spec.training.preflight, context.ranks, device, foreign_bytes=foreign_bytes, nccl_log=nccl_log
    )
    heartbeat.record_progress(replace(heartbeat.progress, network=cluster.network))
    print_on_rank_zero(context, [cluster.describe()] if spec.training.preflight.enabled else [])

    # Claim the output, whose checkpoints must have the same rows. Create the Hub repository now, to fail early if the
    # push is not possible.
    output.check_shared_storage(
        run_on_rank_zero(lambda: output.claim(overwrite=spec.output.overwrite, rows=data.row_identity))
    )
    if push := spec.output.push_to_hub:
        run_on_rank_zero(lambda: create_repository(push))
    attempt_log = start_attempt_log(context, output, heartbeat) if context.ranks.is_rank_zero else None

    # Choose attention backend and batch size, and build the trainer.
    disable_cudnn_attention()
    attention = run_on_rank_zero(lambda: choose_attention(spec, model_description, data, output, device))
    print_on_rank_zero(context, [f"attention: {attention.name} ({attention.reason})"])
    print_on_rank_zero(context, describe_linear_attention(model_description.config))
    model_description = replace(model_description, attention=attention.name)
    report_degradations(
        spec, context, heartbeat, (*cluster.degraded, *describe_model_compute(spec, model_description, device))
    )
    setup = TrainingSetup(
        context, heartbeat, DeviceConfig(device, model_description.dtype), model_description, data, output
    )
    plan, models = resolve_auto_batch_size(plan, setup)
    on_gpu, is_rank_zero = device.type == "cuda", context.ranks.is_rank_zero
    forecast = forecast_rank_memory(plan, model_description, data, on_gpu=on_gpu) if is_rank_zero else None
    trainer = assemble_trainer(plan, setup, models, forecast=forecast)
    del models  # the trainer may release the reference model before the first step
    print_on_rank_zero(context, describe_trainer(trainer, setup))
    print_on_rank_zero(context, [format_rank_forecast(forecast)] if forecast else [])

    # Train from the newest checkpoint, and publish.
    resume_point = trainer.inputs.checkpoints.find_intact()
    if attempt_log is not None:
        add_recorders(trainer, attempt_log, trackers, first_step=resume_point.step)
    if not train(trainer, resume_point, total_steps=trainer.args.max_steps):
        return contract.STOPPED
    publish_result(trainer, output, model_description, title=f"{context.namespace}/{context.job}")
    return contract.DONE


def check_output(output: OutputFolder, cache: Path, *, overwrite: bool) -> None:
    """Check that the output belongs to this job, and that no folder to write to is a link. Raises: OutputError."""
    output.check_owner(overwrite=overwrite)
    logs = (output.logs / f"attempt-{output.identity.attempt}", output.logs / "tensorboard")
    caches = ("tokens", "hub/modelscope", "huggingface/hub", "huggingface/xet")
    check_no_links((output.checkpoints, output.result, *logs, *(cache / name for name in caches)))


def start_attempt_log(context: RankContext, output: OutputFolder, heartbeat: HeartbeatWriter) -> AttemptLog:
    """Record in the output that the attempt has started. Called on rank 0 only, after it has claimed the output."""
    identity = output.identity
    entry = AttemptEntry(identity.uid, identity.attempt, context.ranks.world_size, heartbeat.started_at)
    attempt_log = AttemptLog(output.logs, entry)
    with heartbeat.tolerate_errors(ATTEMPT_FILE):
        attempt_log.write()
    return attempt_log


def add_recorders(
    trainer: GlobalMeanTrainer, attempt_log: AttemptLog, trackers: Iterable[str], *, first_step: int
) -> None:
    """Add the callbacks that record the steps of the training. Called on rank 0 only."""
    heartbeat, logs, plan = trainer.inputs.heartbeat, trainer.inputs.checkpoints.output.logs, trainer.inputs.plan
    with heartbeat.tolerate_errors(ATTEMPT_FILE):
        settings = describe_repairable_settings(plan.spec, plan.batch, os.environ)
        attempt_log.start_training(first_step=first_step, settings=settings)
    callbacks = {ATTEMPT_FILE: AttemptLogCallback(attempt_log)}
    for name in trackers:
        with heartbeat.tolerate_errors(name):
            callbacks[name] = build_tracker(name, logs=logs, first_step=first_step)
    trainer.add_callback(RecorderThreads(callbacks, heartbeat))


def describe_model_compute(
    spec: TrainerSpec, model_description: ModelDescription, device: torch.device
) -> Iterator[Degradation]:
    """Yield what slows the computation of the model down."""
    yield from describe_slow_linear_attention(model_description.config, device)
    yield from describe_compute(
        device,
        model_description.dtype,
        requested_dtype=spec.model.torch_dtype,
        attention=model_description.attention,
        requested_attention=spec.model.attn_implementation,
    )


def report_degradations(
    spec: TrainerSpec, context: RankContext, heartbeat: HeartbeatWriter, degraded: tuple[Degradation, ...]
) -> None:
    """Report what slows the job down in heartbeat and log. Raises: Degraded, if spec.training.onDegraded is fail."""
    heartbeat.record_degradations(degraded)
    lines = [f"warning: degraded: {each.reason}: {each.message}" for each in degraded]
    print_on_rank_zero(context, lines)
    if degraded and spec.training.on_degraded == "fail":
        raise Degraded("; ".join(f"{each.reason}: {each.message}" for each in degraded))


def report_integrity(inputs: TrainerInputs, resume_point: ResumePoint) -> None:
    """Report damaged checkpoints, and what releases without checksums wrote; this does not end a job."""
    data = inputs.data
    is_verified = {
        "the checkpoint": resume_point.is_verified,
        "the cached training rows": data.train.content_digest,
        "the cached evaluation rows": data.eval is None or data.eval.content_digest,
    }
    unverified = " and ".join(name for name in is_verified if not is_verified[name])
    text = unverified and f"a release without checksums wrote {unverified}, so that damage is not detected"
    found = {"CheckpointSkipped": "; ".join(resume_point.skipped), "Unverified": text}
    degraded = tuple(Degradation(reason, message) for reason, message in found.items() if message)
    inputs.heartbeat.record_degradations(degraded)
    for each in degraded if inputs.ranks.is_rank_zero else ():
        print(f"warning: {each.reason}: {each.message}", flush=True)


def connect_ranks(spec: TrainerSpec, ranks: Ranks, device: torch.device, data: TrainingData) -> None:
    """Join the process group, and check that all ranks have the same data and hardware.

    Raises: DatasetError or MixedHardware, on every rank.
    """
    init_process_group(device, timeout_seconds=spec.training.ddp_timeout)
    check_same_rows(all_gather_objects(data.digest), ranks_per_node=ranks.local_world_size)
    if not spec.training.allow_mixed_hardware:
        hardware = all_gather_objects(describe_rank_hardware(device))
        check_same_hardware(hardware, ranks_per_node=ranks.local_world_size)
    if spec.deepspeed:
        from finetune_trainer.parallel.deepspeed_engine import init_deepspeed  # takes seconds to import

        init_deepspeed(get_device_backend(device))


def choose_attention(
    spec: TrainerSpec,
    model_description: ModelDescription,
    data: TrainingData,
    output: OutputFolder,
    device: torch.device,
) -> AttentionChoice:
    """Choose the attention backend for the longest row or for the length of a pack. Runs on rank 0 only."""
    max_length = spec.dataset.max_length if spec.dataset.packing else int(data.train.lengths.max())
    assert max_length is not None  # packing requires maxLength
    trial = build_attention_trial(spec, model_description.config, model_description.dtype, device, max_length)
    with output.writing():  # select_attention may write its choice
        return select_attention(spec, trial, output.checkpoints, is_multimodal=model_description.vision is not None)


def describe_trainer(trainer: GlobalMeanTrainer, setup: TrainingSetup) -> Iterator[str]:
    """Yield the log lines about the trainer that rank 0 prints before the first step."""
    inputs = trainer.inputs
    yield from describe_run(inputs.plan, setup.context, setup.device_config)
    yield from describe_packing(inputs.data, inputs.plan.batch, inputs.layout)
    yield from describe_weights(inputs.model, inputs.family)
    yield from (f"{subject}: {note}" for subject, note in inputs.notes.items())


def train(trainer: GlobalMeanTrainer, resume_point: ResumePoint, *, total_steps: int) -> bool:
    """Train from the resume point to the last step. Return False if a stop request ended training earlier."""
    checkpoint = resume_point.path
    if not trainer.inputs.ranks.is_rank_zero:  # rank 0 publishes, and redacts report and model card
        forget_secrets(is_loaded=True)
    trainer.inputs.heartbeat.start_training(
        resume_point.step, total_steps=total_steps, checkpoint=checkpoint.name if checkpoint else None
    )
    report_integrity(trainer.inputs, resume_point)
    if trainer.inputs.ranks.is_rank_zero and checkpoint:
        print(f"resuming from {checkpoint}", flush=True)
    if checkpoint and trainer.is_final_checkpoint(checkpoint):
        trainer.load_final_checkpoint(checkpoint)
        return True
    # Seed each rank differently, so that the ranks draw different dropout masks.
    transformers.set_seed((trainer.args.seed + trainer.inputs.ranks.rank) % 2**32)
    trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    trainer.inputs.heartbeat.enter_phase(contract.SAVE)
    trainer.finish_save()
    return trainer.is_finished or not trainer.stop_agreed


def build_download_settings(spec: TrainerSpec, context: RankContext, heartbeat: HeartbeatWriter) -> DownloadSettings:
    """Build the settings for downloads from the Hub, which rank 0 stores on the shared claim once per job."""
    return DownloadSettings(
        context.cache / "hub", context.uid, context.ranks.is_rank_zero, heartbeat.touch, spec.training.ddp_timeout
    )


def choose_cache_role(ranks: Ranks) -> CacheRole:
    """Return whether this rank tokenizes the rows: rank 0 does, for all nodes, on the storage that they share."""
    if ranks.is_rank_zero:
        return CacheRole.WRITER
    return CacheRole.DEPUTY if ranks.local_rank == 0 else CacheRole.READER


def build_tokenization_config(
    spec: TrainerSpec,
    model_description: ModelDescription,
    context: RankContext,
    downloads: DownloadSettings,
    trained_rows: RowIdentity | None = None,
) -> TokenizationConfig:
    """Build the tokenization config of this rank."""
    rope = find_switching_rope(model_description.config)
    return TokenizationConfig(
        tokenizer=model_description.tokenizer,
        model_name=model_description.name,
        row_renderer=select_row_renderer(spec),
        rules=RowRules(
            spec.dataset.max_length or model_description.max_length, spec.dataset.overlong, spec.dataset.on_bad_row
        ),
        seed=spec.training.seed,
        cache=context.cache,
        role=choose_cache_role(context.ranks),
        processes=max(1, floor(count_cpus(context.planned_cpus, Cgroup()))),
        send_heartbeat=downloads.send_heartbeat,
        downloads=downloads,
        vision=model_description.vision,
        model_revision=model_description.revision,
        template_kwargs=spec.dataset.chat_template_kwargs,
        attempt=context.attempt,
        trained_rows=trained_rows,
        rope_limit=rope.limit if rope else None,
    )
