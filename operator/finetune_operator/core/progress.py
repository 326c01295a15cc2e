"""Derives progress, steps and batch of the current attempt from polled reports and termination messages.

Polled reports only inform people, since they can be forged (decisions/129). Budgets, repairs and verdicts are computed
from the evidence, which contains what the termination messages reported.

`updateTime` is the time of the heartbeat of rank 0 (finetune_supervisor.liveness.heartbeat), or of the poll
(controller.progress_poller) if a report has none.
"""

from dataclasses import replace

from finetune_api.batch import Batch
from finetune_api.oom_repair import apply_repair
from finetune_api.v1alpha1.job import FineTuneJob
from finetune_api.v1alpha1.status import Evidence, JobStatus, Progress
from finetune_operator.core.job_context import JobContext
from finetune_operator.observation.pods import NodeObservation, Observation
from finetune_operator.plan.run_plan import resolve_chosen_batch, resolve_planned_batch

# They hold for all attempts of a job, but an attempt reports them only after it has found them.
_KEPT_FIELDS = ("last_checkpoint", "model_revision")


def find_newest_progress(
    status: JobStatus, nodes: tuple[NodeObservation, ...], polled_progress: Progress | None
) -> Progress | None:
    """Return the progress in the termination message of node 0, otherwise the newest from polls and from the status."""
    final_reports = [node.termination.progress for node in nodes if node.node_rank == 0 and node.termination]
    final_report = next((report for report in final_reports if report is not None), None)
    newest_report, current_progress = final_report or polled_progress, status.progress
    if newest_report is None:
        return current_progress
    if (
        final_report is None
        and current_progress is not None
        and newest_report.update_time
        and current_progress.update_time
        and newest_report.update_time < current_progress.update_time
    ):
        return current_progress
    return _keep_fields(newest_report, current_progress) if current_progress else newest_report


def _keep_fields(report: Progress, current_progress: Progress) -> Progress:
    """Return the report with current values of the fields that an attempt does not report from its start."""
    missing = [name for name in _KEPT_FIELDS if getattr(report, name) is None]
    kept_values = {name: value for name in missing if (value := getattr(current_progress, name)) is not None}
    return replace(report, **kept_values) if kept_values else report


def summarise_steps(context: JobContext) -> dict[str, object]:
    """Return the first and the last step of the attempt record with their times; None if not reported."""
    record = context.record
    terminations = [node.termination for node in context.nodes if node.termination]
    progress = (*(termination.progress for termination in terminations), context.observation.progress)
    reports = [report for report in progress if report is not None]
    first_steps = [termination.first_step for termination in terminations] + [report.first_step for report in reports]
    first_step_times = [report.first_step_time for report in reports]
    last_report = max(reports, key=lambda report: report.step, default=None)
    first_step = record.first_step
    if first_step is None:
        first_step = min((step for step in first_steps if step is not None), default=None)
    last_step, last_step_time = record.last_step, record.last_step_time
    if last_report is not None and (last_step is None or last_report.step > last_step):
        last_step, last_step_time = last_report.step, last_report.update_time or context.now
    earliest_time = min((time for time in first_step_times if time is not None), default=None)
    return {
        "first_step": first_step,
        "first_step_time": record.first_step_time or earliest_time,
        "last_step": last_step,
        "last_step_time": last_step_time,
    }


def resolve_final_batch(job: FineTuneJob, evidence: tuple[Evidence, ...]) -> Batch | None:
    """Return the batch of a failed attempt: of the repaired spec or, for `auto`, of its termination messages.

    Without such a message it is the smallest batch; None for a command.
    """
    spec = apply_repair(job.spec, job.status.repair)
    planned_batch = resolve_planned_batch(spec)
    if planned_batch is None or not spec.training.has_auto_batch_size:
        return planned_batch
    sizes = (each.per_device_train_batch_size for each in evidence)
    return next((batch for size in sizes if (batch := resolve_chosen_batch(spec, size)) is not None), planned_batch)


def resolve_current_batch(job: FineTuneJob, observation: Observation) -> Batch | None:
    """Return the batch of the repaired spec or, for `auto`, the batch that the trainer reported last, for display.

    None for a command, and for `auto` until the trainer has reported its choice.
    """
    spec = apply_repair(job.spec, job.status.repair)
    if spec.command is not None or not spec.training.has_auto_batch_size:
        return resolve_planned_batch(spec)
    attempt, recorded_batch = job.status.attempt, job.status.batch
    nodes = observation.nodes_of_attempt(attempt) if attempt is not None else ()
    final_reports = [node.termination.progress for node in nodes if node.termination]
    reports = [report for report in (*final_reports, observation.progress) if report is not None]
    sizes = [report.per_device_train_batch_size for report in reports]
    candidates = [*sizes, recorded_batch.per_device_train_batch_size if recorded_batch else None]
    return next((batch for size in candidates if (batch := resolve_chosen_batch(spec, size)) is not None), None)
