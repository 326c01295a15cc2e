"""Prometheus metrics of single jobs, in the style of kube-state-metrics: values are read from the status at a scrape.

Only the leader exports them, so that sums do not count a job twice, and for a limited number of jobs (decisions/133).
"""

import heapq
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from itertools import product
from typing import Any

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector
from pydantic import ValidationError

from finetune_api.v1alpha1.devices import count_devices
from finetune_api.v1alpha1.methods import METHODS
from finetune_api.v1alpha1.status import AttemptState, JobStatus, Phase
from finetune_operator.controller.child_cache import JobKey
from finetune_operator.controller.job_cache import JobCache
from finetune_operator.core.gpu_seconds import MICROSECONDS, GpuCategory, GpuPhase, account_gpu_time
from finetune_operator.core.restrictions import OPERATOR_RESTRICTED
from finetune_operator.observation.ownership import RawBody, parse_time

MAX_LABEL_CHARACTERS = 128
COMMAND = "command"
# conditions that are exported while they are True
EXPORTED_CONDITIONS = ("Stalled", "Degraded", "TrainerImageOutdated", OPERATOR_RESTRICTED)
_ACTIVE_STATES = (AttemptState.STARTING, AttemptState.RUNNING, AttemptState.STOPPING)
# description and further labels of each metric finetune_job_<name>, beside namespace and name
_METRICS: dict[str, tuple[str, tuple[str, ...]]] = {
    "info": ("Constant 1 with the properties of a job.", ("uid", "method", "model")),
    "phase": ("Constant 1 with the current phase.", ("phase",)),
    "condition": (f"1 while a condition is True: {', '.join(EXPORTED_CONDITIONS)}.", ("condition", "reason")),
    "created_timestamp_seconds": ("Time of creation.", ()),
    "completion_timestamp_seconds": ("Time at which the job became Complete or Failed.", ()),
    "waiting_since_timestamp_seconds": ("Time since which pods of the job do not start.", ("reason",)),
    "nodes": ("Nodes of the current attempt.", ()),
    "gpus": ("GPUs, or other compute devices, that the job requests.", ()),
    "gpus_allocated": ("GPUs that the pods of the current attempt hold.", ()),
    "gpu_seconds": ("Time for which the job held GPUs, multiplied by their number.", ("phase", "fault")),
    "failed_attempts": ("Attempts that failed and were restarted.", ()),
    "progress_ratio": ("Completed share of the planned steps.", ()),
    "progress_timestamp_seconds": ("Time at which rank 0 last reported progress.", ()),
    "eta_seconds": ("Estimated time until the last step.", ()),
    "loss": ("Last reported training loss.", ()),
    "tokens_per_second": ("Tokens per second of all ranks.", ()),
}
Sample = tuple[str, tuple[str, ...], float]  # name in _METRICS, values of its further labels, value


@dataclass(frozen=True)
class _ParsedJob:
    """What the metrics of a job are computed from."""

    version: str
    namespace: str
    name: str
    info: tuple[str, str, str]
    created_at: datetime | None
    requested_gpus: int
    num_nodes: int
    status: JobStatus


class JobMetrics(Collector):
    """Exports the jobs of a cache: unfinished ones first, then the latest finished ones, at most `max_jobs`."""

    def __init__(
        self, jobs: JobCache, *, is_leading: Callable[[], bool], now: Callable[[], datetime], max_jobs: int
    ) -> None:
        self._jobs, self._is_leading, self._now, self._max_jobs = jobs, is_leading, now, max_jobs
        self._parsed: dict[JobKey, _ParsedJob] = {}  # of the last scrape; changed jobs are parsed again

    def describe(self) -> Iterable[GaugeMetricFamily]:
        """Return the metric families without samples, so that registration parses no jobs."""
        return self._build_families().values()

    def collect(self) -> Iterable[GaugeMetricFamily]:
        """Return the metrics of the selected jobs; no samples unless this replica leads."""
        families = self._build_families()
        if self._is_leading():
            selected = self._select_jobs()
            self._parsed = {key: self._parse(key) for key in selected}
            families["metrics_omitted"].add_metric([], len(self._jobs) - len(selected))
            now = self._now()
            for job in self._parsed.values():
                for metric, labels, value in _list_samples(job, now):
                    families[metric].add_metric((job.namespace, job.name, *map(_bound_label, labels)), value)
        return families.values()

    @staticmethod
    def _build_families() -> dict[str, GaugeMetricFamily]:
        families = {
            metric: GaugeMetricFamily(f"finetune_job_{metric}", description, labels=("namespace", "name", *labels))
            for metric, (description, labels) in _METRICS.items()
        }
        omitted = GaugeMetricFamily("finetune_job_metrics_omitted", "Jobs without metrics, beyond the limit.")
        return {**families, "metrics_omitted": omitted}

    def _select_jobs(self) -> list[JobKey]:
        return heapq.nlargest(self._max_jobs, self._jobs, key=self._jobs.get_completion_order)

    def _parse(self, key: JobKey) -> _ParsedJob:
        parsed, version = self._parsed.get(key), self._jobs.get_version(key)
        return parsed if parsed is not None and parsed.version == version else _parse_job(self._jobs.read(key))


def _parse_job(body: RawBody) -> _ParsedJob:
    """Parse what the metrics need; what another release wrote and this one cannot read is left out."""
    metadata, spec, raw_status = body["metadata"], body.get("spec") or {}, body.get("status") or {}
    method = next((name for name in (*METHODS, COMMAND) if spec.get(name) is not None), "")
    model = spec.get("model")
    model_name = str(model.get("name", "")) if isinstance(model, dict) else ""
    try:
        status = JobStatus.model_validate(_without_evidence(raw_status))
    except ValidationError:
        status = JobStatus()
    num_nodes = spec.get("numNodes", 1)
    num_nodes = num_nodes if isinstance(num_nodes, int) else 0
    return _ParsedJob(
        version=metadata["resourceVersion"],
        namespace=metadata["namespace"],
        name=metadata["name"],
        info=(metadata["uid"], method, model_name),
        created_at=parse_time(metadata.get("creationTimestamp")),
        requested_gpus=num_nodes * _count_devices(spec),
        num_nodes=num_nodes,
        status=status,
    )


def _without_evidence(status: RawBody) -> RawBody:
    """Return the status without the largest fields, which the metrics do not need."""
    attempts: Any = status.get("attempts")
    if not isinstance(attempts, list):
        return status
    dropped = ("evidence", "evidenceSummary")
    small = [
        {k: v for k, v in each.items() if k not in dropped} if isinstance(each, dict) else each for each in attempts
    ]
    return {**status, "attempts": small, "nodes": []}


def _count_devices(spec: RawBody) -> int:
    limits = (spec.get("resources") or {}).get("limits") or {}
    try:
        return count_devices(limits)
    except (ValueError, AttributeError, TypeError):  # another release accepted it
        return 0


def _bound_label(value: str) -> str:
    """Return the label value truncated, and without characters that have no UTF-8 encoding."""
    return value[:MAX_LABEL_CHARACTERS].encode(errors="replace").decode()


def _list_samples(job: _ParsedJob, now: datetime) -> Iterator[Sample]:
    status = job.status
    yield "info", job.info, 1
    yield "phase", (status.phase or Phase.QUEUED,), 1
    yield from (
        ("condition", (condition.type, condition.reason), 1)
        for condition in status.conditions
        if condition.type in EXPORTED_CONDITIONS and condition.status == "True"
    )
    yield from _list_times(job)
    record = status.attempts[-1] if status.attempts else None
    is_active = record is not None and record.state in _ACTIVE_STATES
    yield "nodes", (), record.num_nodes or job.num_nodes if record and is_active else 0
    yield "failed_attempts", (), status.restarts
    yield "gpus", (), job.requested_gpus
    if job.requested_gpus or status.gpu_seconds:
        yield "gpus_allocated", (), record.gpus or 0 if record and is_active and record.allocated_time else 0
        yield from _list_gpu_seconds(job, now)
    yield from _list_progress(status)


def _list_times(job: _ParsedJob) -> Iterator[Sample]:
    waiting, completion_time = job.status.waiting, job.status.completion_time
    if job.created_at is not None:
        yield "created_timestamp_seconds", (), job.created_at.timestamp()
    if completion_time is not None:
        yield "completion_timestamp_seconds", (), completion_time.timestamp()
    if waiting is not None:
        yield "waiting_since_timestamp_seconds", (waiting.reason,), waiting.since.timestamp()


def _list_gpu_seconds(job: _ParsedJob, now: datetime) -> Iterator[Sample]:
    """Yield all phases without a fault, and the phases of each fault that occurred, from zero."""
    faults = (record.fault for record in job.status.attempts if record.fault is not None)
    gpu_time: dict[GpuCategory, int] = {(phase, None): 0 for phase in GpuPhase}
    for phase, fault in product((GpuPhase.STARTING, GpuPhase.LOST, GpuPhase.STOPPING), faults):
        gpu_time[phase, fault] = 0
    gpu_time.update(account_gpu_time(job.status, now, is_command=job.info[1] == COMMAND))
    for category, time in gpu_time.items():
        yield "gpu_seconds", (category[0], category[1] or ""), time / MICROSECONDS


def _list_progress(status: JobStatus) -> Iterator[Sample]:
    progress = status.progress
    if progress is None:
        return
    if progress.total_steps:
        yield "progress_ratio", (), min(1.0, progress.step / progress.total_steps)
    if progress.update_time is not None:
        yield "progress_timestamp_seconds", (), progress.update_time.timestamp()
    if status.phase is not Phase.RUNNING:  # these values are those of the last attempt that trained
        return
    values = {
        "eta_seconds": progress.eta_seconds,
        "loss": progress.loss,
        "tokens_per_second": progress.tokens_per_second,
    }
    yield from ((metric, (), value) for metric, value in values.items() if value is not None)
