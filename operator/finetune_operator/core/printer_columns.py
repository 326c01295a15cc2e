"""Builds the columns of `kubectl get`."""

from finetune_api.v1alpha1.job import FineTuneJob
from finetune_api.v1alpha1.status import Display, Phase
from finetune_operator.observation.pods import NodeObservation, PodPhase


def build_columns(job: FineTuneJob, nodes: tuple[NodeObservation, ...], phase: Phase) -> Display:
    """Build the columns of one job; throughput and remaining time are empty unless the job runs."""
    progress, scheduling = job.status.progress, job.status.scheduling
    running_nodes = sum(node.phase is PodPhase.RUNNING and not node.is_terminating for node in nodes)
    columns = {"nodes": f"{running_nodes}/{job.num_attempt_nodes}"}
    if scheduling is not None and scheduling.queue_name:
        position = "" if scheduling.position is None else f" #{scheduling.position}"
        columns["queue"] = f"{scheduling.queue_name}{position}"
    if progress is not None:
        if progress.total_steps:
            percent = 100 * progress.step // progress.total_steps
            steps = f"{progress.step}/{progress.total_steps}"
            columns["progress"] = f"stopped early {steps}" if progress.stopped_early else f"{percent}% {steps}"
        if progress.loss is not None:
            columns["loss"] = f"{progress.loss:.3f}"
        if phase is Phase.RUNNING and progress.tokens_per_second is not None:
            columns["tokens_per_second"] = format_number(progress.tokens_per_second)
        if phase is Phase.RUNNING and progress.eta_seconds is not None:
            columns["eta"] = format_duration(progress.eta_seconds)
    return Display(**columns)


def format_number(number: float) -> str:
    """Format a number in short form, for example 18432 as 18.4k."""
    for size, suffix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.1f}{suffix}"
    return f"{number:.0f}"


def format_duration(seconds: int) -> str:
    """Format a duration as kubectl formats ages, for example 1320 seconds as 22m."""
    if seconds < 120:
        return f"{seconds}s"
    if seconds < 7200:
        return f"{seconds // 60}m"
    return f"{seconds // 3600}h{seconds % 3600 // 60}m" if seconds < 172_800 else f"{seconds // 86400}d"
