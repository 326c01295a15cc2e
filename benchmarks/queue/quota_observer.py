"""Records the timeline of the quota from watches of jobs, pods and Workloads."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from benchmarks.load.job_bodies import JOBS_PATH, PODS_PATH
from benchmarks.queue.job_plans import QueuedJob
from benchmarks.queue.simulated_kubelet import is_running
from benchmarks.queue.timeline import GpuUse, UseChange, WaitStage
from benchmarks.queue.workloads import get_eviction, get_job_name, get_reserved_gpus, is_true
from benchmarks.rig import NAMESPACE
from finetune_operator import names
from finetune_operator.kube.api_paths import collection_path
from finetune_operator.kube.informer import ChangeHandler, Informer

WORKLOADS_PATH = collection_path(names.WORKLOAD_KIND, NAMESPACE)

RawBody = dict[str, Any]


class QuotaObserver:
    """Jobs, pods and Workloads as last observed, and the changes of their use of GPUs."""

    def __init__(self, plans: Mapping[str, QueuedJob], *, on_pod_event: ChangeHandler) -> None:
        self.jobs: dict[str, RawBody] = {}  # last known body, also of deleted jobs
        self.deleted_jobs: set[str] = set()
        self.changes: list[UseChange] = []
        self.evictions: Counter[str] = Counter()  # by reason
        self.workloads: dict[str, RawBody] = {}  # by job
        self._plans = plans
        self._on_pod_event = on_pod_event
        self._pods: defaultdict[str, dict[str, RawBody]] = defaultdict(dict)  # by job and name
        self._uses: dict[str, GpuUse | None] = {}
        self._known_evictions: set[tuple[str, tuple[str, str]]] = set()

    def build_informers(self, api: Any) -> tuple[Informer, ...]:
        """Return the informers that keep the state up to date."""
        return (
            Informer(api, JOBS_PATH, selector="", on_change=self._on_job),
            Informer(api, PODS_PATH, selector=names.JOB_UID, on_change=self._on_pod),
            Informer(api, WORKLOADS_PATH, selector="", on_change=self._on_workload),
        )

    def has_condition(self, job: str, condition_type: str) -> bool:
        conditions = self.jobs.get(job, {}).get("status", {}).get("conditions", ())
        return any(c["type"] == condition_type and c["status"] == "True" for c in conditions)

    def has_ended(self, job: str) -> bool:
        """Return whether the job is Complete, Failed or deleted."""
        return job in self.deleted_jobs or self.has_condition(job, "Finished")

    def is_running(self, job: str) -> bool:
        """Return whether all pods of the job run."""
        running = [pod for pod in self._pods[job].values() if is_running(pod)]
        return len(running) == self._plans[job].nodes

    def list_pods(self) -> list[RawBody]:
        """Return the existing pods of all jobs."""
        return [pod for pods in self._pods.values() for pod in pods.values()]

    def _on_job(self, _old: RawBody | None, new: RawBody | None) -> None:
        name = (new or _old or {})["metadata"]["name"]
        if new is None:
            self.deleted_jobs.add(name)
        else:
            self.jobs[name] = new
        self._update(name)

    def _on_pod(self, old: RawBody | None, new: RawBody | None) -> None:
        metadata = (new or old or {})["metadata"]
        job = metadata["labels"][names.JOB_NAME]
        if new is None:
            self._pods[job].pop(metadata["name"], None)
        else:
            self._pods[job][metadata["name"]] = new
        self._update(job)
        self._on_pod_event(old, new)

    def _on_workload(self, old: RawBody | None, new: RawBody | None) -> None:
        job = get_job_name((new or old or {})["metadata"]["name"])
        if new is None:
            self.workloads.pop(job, None)
        else:
            self.workloads[job] = new
            eviction = get_eviction(new)
            if eviction is not None and (job, eviction) not in self._known_evictions:
                self._known_evictions.add((job, eviction))
                self.evictions[eviction[0]] += 1
        self._update(job)

    def _update(self, job: str) -> None:
        """Append a change if the job uses GPUs in another way than before."""
        use = self._derive_use(job) if job in self._plans else None
        if use != self._uses.get(job):
            self._uses[job] = use
            self.changes.append(UseChange(time.monotonic(), job, use))

    def _derive_use(self, job: str) -> GpuUse | None:
        plan, workload = self._plans[job], self.workloads.get(job, {})
        reserved = get_reserved_gpus(workload)
        pods = self._pods[job].values()
        bound = plan.gpus_per_node * sum(occupies_node(pod) for pod in pods)
        if job in self.deleted_jobs and not reserved and not bound:
            return None
        waits_for = None
        if not reserved and job not in self.deleted_jobs and wants_quota(self.jobs.get(job)):
            waits_for = self._find_wait_stage(plan, workload)
        returned_early = plan.gpus_per_node * count_pods_without_quota(pods, workload)
        is_evicted = get_eviction(workload) is not None
        return GpuUse(plan.gpus, reserved, bound, returned_early, waits_for, is_evicted=is_evicted)

    def _find_wait_stage(self, plan: QueuedJob, workload: RawBody) -> WaitStage | None:
        if is_true(workload, "Finished"):
            return None  # all pods have succeeded
        gated = [pod for pod in self._pods[plan.name].values() if is_gated(pod)]
        return WaitStage.QUEUE if len(gated) >= plan.nodes else WaitStage.PODS


def wants_quota(job: RawBody | None) -> bool:
    """Return whether the job is to run: it is not finished, suspended, cancelled or being deleted."""
    if job is None or "deletionTimestamp" in job["metadata"]:
        return False
    spec, status = job["spec"], job.get("status", {})
    return not spec.get("suspend") and not spec.get("cancel") and "completionTime" not in status


def occupies_node(pod: RawBody) -> bool:
    """Return whether the pod holds the GPUs of a Kubernetes node."""
    is_ended = pod.get("status", {}).get("phase") in ("Succeeded", "Failed")
    return bool(pod["spec"].get("nodeName")) and not is_ended


def count_pods_without_quota(pods: Iterable[RawBody], workload: RawBody) -> int:
    """Return the terminating pods on nodes of which Kueue has returned the quota, because none had started."""
    if get_eviction(workload) is None or get_reserved_gpus(workload):
        return 0
    return sum(occupies_node(pod) and is_terminating(pod) for pod in pods)


def is_gated(pod: RawBody) -> bool:
    """Return whether the pod waits for its admission."""
    return bool(pod["spec"].get("schedulingGates")) and not is_terminating(pod)


def is_terminating(pod: RawBody) -> bool:
    return "deletionTimestamp" in pod["metadata"]
