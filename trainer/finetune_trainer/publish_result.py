"""Publish the result of a run: the weights with tokenizer, log, report and model card, then the success marker."""

import os
import time
from concurrent.futures import wait
from dataclasses import replace
from glob import escape
from pathlib import Path

from finetune_api.v1alpha1.training import EVAL_LOSS
from finetune_supervisor import contract
from finetune_supervisor.failures.redact import Redactor, find_secrets
from finetune_trainer.card_marker import CARD_FILE
from finetune_trainer.checkpoint.manifest import parse_checkpoint_step
from finetune_trainer.checkpoint.output_folder import OutputFolder
from finetune_trainer.checkpoint.state_files import READ_ERRORS, StateReader
from finetune_trainer.distributed.collectives import run_on_rank_zero
from finetune_trainer.errors import CheckpointCorrupt
from finetune_trainer.hubs import upload
from finetune_trainer.model.load import ModelDescription
from finetune_trainer.model.merge import write_merged_model
from finetune_trainer.model.save import save_tokenizer_and_processors, save_weights
from finetune_trainer.model_card.collect import collect_card_content, write_model_card
from finetune_trainer.parallel.model_state import WEIGHT, Tensors, build_key, gather_weights, list_saved_buffers
from finetune_trainer.parallel.state_access import build_state_access
from finetune_trainer.report.attempt_history import build_history
from finetune_trainer.report.attempt_log import read_attempts
from finetune_trainer.report.html_report import FILE_NAME as REPORT_FILE
from finetune_trainer.report.html_report import ReportData, write_report
from finetune_trainer.report.run_summary import RunSummary
from finetune_trainer.storage_faults import check_is_about_content
from finetune_trainer.training.base_trainer import GlobalMeanTrainer
from finetune_trainer.training.early_stopping import EvaluationPolicy, TrainingOutcome, determine_outcome

# Omit spec.env, which may contain secrets.
_REPORTED_FIELDS = {"model", "dataset", "sft", "dpo", "lora", "training", "num_nodes"}


def publish_result(
    trainer: GlobalMeanTrainer, output: OutputFolder, model_description: ModelDescription, *, title: str
) -> None:
    """Publish the adapter or full model to the output and, if requested, to the Hub (collective)."""
    trainer.inputs.heartbeat.enter_phase(contract.PUBLISH)
    lora, is_rank_zero = trainer.inputs.plan.spec.lora, trainer.inputs.ranks.is_rank_zero
    # Full fine-tuning trains float32 weights; publish them in the dtype of the base model.
    dtype = None if lora else model_description.dtype
    weights = gather_weights(trainer.model, build_state_access(trainer), keep_result=is_rank_zero, dtype=dtype)
    outcome = report_outcome(trainer)
    if outcome:
        progress = replace(
            trainer.inputs.heartbeat.progress, ended=outcome.message, stopped_early=outcome.stopped_early
        )
        trainer.inputs.heartbeat.record_progress(progress)

    files: list[str] = []
    redactor = Redactor(find_secrets(os.environ) if is_rank_zero else ())

    def write_result(folder: Path) -> None:
        if outcome and outcome.checkpoint:
            replace_weights(weights, outcome.checkpoint)
        save_weights(trainer.model, weights | ({} if lora else list_saved_buffers(trainer.model)), folder)
        save_tokenizer_and_processors(model_description, folder)
        trainer.state.save_to_json(str(folder / "trainer_state.json"))
        if lora is not None and lora.merge:
            heartbeat = trainer.inputs.heartbeat
            write_merged_model(model_description, folder, folder / "merged", report_progress=heartbeat.touch)
        described = (folder / CARD_FILE, folder / REPORT_FILE)
        with trainer.inputs.heartbeat.tolerate_errors("the model card or the report", *described):
            summary = summarise_run(trainer, output, outcome)
            card = collect_card_content(trainer, model_description, summary, title=title)
            write_model_card(redactor.redact(card), folder, published=output.result)
            write_report(redactor.redact(build_report_data(trainer, summary, title=title, outcome=outcome)), folder)
        files[:] = [escape(str(path.relative_to(folder))) for path in folder.rglob("*") if path.is_file()]

    def publish() -> None:
        if source_check := trainer.inputs.data.source_check:
            while wait([source_check], timeout=1.0).not_done:
                trainer.inputs.heartbeat.touch()
            source_check.result()  # raises an error if rows have changed
        best_step = parse_checkpoint_step(outcome.checkpoint) if outcome and outcome.checkpoint else None
        trainer.inputs.checkpoints.publish(output.result, write_result, retained_step=best_step)
        if push := trainer.inputs.plan.spec.output.push_to_hub:
            print(f"pushed: {upload(push, output.result, title=title, files=files)}", flush=True)
        output.mark_success()
        print(f"result: {output.result}", flush=True)

    run_on_rank_zero(publish)


def replace_weights(weights: Tensors, checkpoint: Path) -> None:
    """Replace the trained weights by those of a checkpoint, in the same dtype. Raises CheckpointCorrupt."""
    try:
        reader = StateReader(checkpoint)
        for name, weight in weights.items():
            if reader.contains(key := build_key(WEIGHT, name)):
                weights[name] = reader.read_tensor(key, weight.shape).to(weight.dtype)
    except READ_ERRORS as error:
        check_is_about_content(error, f"{checkpoint} cannot be read")
        raise CheckpointCorrupt(
            f"{checkpoint} cannot be loaded ({error}); move it to another folder to publish the next best"
        ) from error


def report_outcome(trainer: GlobalMeanTrainer) -> TrainingOutcome | None:
    """Determine and print the outcome of training; return None without an evaluation policy (collective)."""
    if trainer.evaluation_policy is None:
        return None
    state, checkpoints = trainer.state, trainer.inputs.checkpoints
    steps = {"last_step": state.global_step, "total_steps": trainer.args.max_steps}
    outcome = determine_outcome(trainer.evaluation_policy, state.log_history, checkpoints, **steps)
    if trainer.inputs.ranks.is_rank_zero:
        for problem in outcome.skipped_checkpoints:
            print(f"checkpoint skipped: {problem}", flush=True)
        print(outcome.message, flush=True)
    return outcome


def summarise_run(trainer: GlobalMeanTrainer, output: OutputFolder, outcome: TrainingOutcome | None) -> RunSummary:
    """Summarise the run for its report and its model card. Runs on rank 0 only, because it reads the output."""
    inputs, state, last_interval = trainer.inputs, trainer.state, trainer.monitor.latest_summary
    steps = f"completed {state.global_step} of {trainer.args.max_steps} steps"
    policy = trainer.evaluation_policy or EvaluationPolicy(EVAL_LOSS, None, 0.0, publishes_best_weights=False)
    best = policy.compute_status(state.log_history).best_evaluation
    return RunSummary(
        outcome=f"{steps}; {outcome.message}" if outcome else f"{steps}; the weights are those of the last step",
        batch=f"{inputs.plan.batch.effective} ({inputs.plan.batch}: per device x accumulation x ranks)",
        best_evaluation=f"{policy.metric} {best.value:.4g} at step {best.step}" if best else None,
        peak_bytes=last_interval.memory.peak_highest if last_interval else None,
        forecast_bytes=inputs.forecast_bytes,
        on_gpu=trainer.args.device.type == "cuda",
        history=build_history(read_attempts(output.logs, uid=output.identity.uid), now=time.time()),
        degraded=inputs.heartbeat.degraded,
    )


def build_report_data(
    trainer: GlobalMeanTrainer, summary: RunSummary, *, title: str, outcome: TrainingOutcome | None
) -> ReportData:
    """Collect the content of report.html from the trainer."""
    inputs, monitor = trainer.inputs, trainer.monitor
    spec = inputs.plan.spec.model_dump(mode="json", by_alias=True, exclude_none=True, include=_REPORTED_FIELDS)
    derived_values = {
        "effective batch": inputs.plan.batch,
        "steps": trainer.state.global_step,
        "samples": len(inputs.data.train),
    }
    derived_values |= {"model commit": commit} if (commit := inputs.heartbeat.progress.model_revision) else {}
    derived_values |= {"end": outcome.message} if outcome else {}
    return ReportData(
        title=f"{title}: {inputs.plan.spec.model.name}",
        job={**derived_values, **spec},
        log_history=trainer.state.log_history,
        lengths=inputs.data.train.lengths,
        summary=summary,
        last_interval=monitor.latest_summary,
        own_step_seconds=monitor.own_step_seconds,
    )
