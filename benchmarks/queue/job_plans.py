"""Plans the jobs of the queue benchmark: sizes, priorities, arrival times and what their users do."""

from __future__ import annotations

import random
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from benchmarks.load.job_bodies import FAKE_POD_FIELDS
from benchmarks.rig import NAMESPACE
from finetune_operator import names

GPU = "nvidia.com/gpu"
QUEUE = "gpus"
PRIORITIES = {"low": 10, "normal": 100, "high": 1000}
PRIORITY_WEIGHTS = (10, 7, 3)
NODE_WEIGHTS = {1: 8, 2: 5, 3: 2, 4: 3, 8: 2}
GPU_WEIGHTS = {1: 4, 2: 3, 4: 3, 8: 4}  # powers of two, so that pods of different sizes fit on one Kubernetes node
MIN_RUN_SECONDS, MAX_RUN_SECONDS = 2.0, 15.0
MIN_DISTURBED_SECONDS = 6.0  # run time of jobs that fail or are suspended while they run
MAX_ACTION_SECONDS = 25.0
RESTART_POLICY = {"backoffSeconds": 1, "maxBackoffSeconds": 5}

RawBody = dict[str, Any]


class JobAction(StrEnum):
    """What happens to a job apart from its run."""

    NONE = "runs undisturbed"
    FAIL = "a rank is killed once"
    SUSPEND = "is suspended and resumed"
    CANCEL = "is cancelled"
    DELETE = "is deleted"


ACTION_SHARES = {JobAction.FAIL: 0.08, JobAction.SUSPEND: 0.06, JobAction.CANCEL: 0.04, JobAction.DELETE: 0.04}
ENDING_ACTIONS = (JobAction.CANCEL, JobAction.DELETE)


@dataclass(frozen=True)
class QueuedJob:
    """Plan of one job.

    start_seconds: arrival after the start of the benchmark. run_seconds: time for which all nodes run.
    action_seconds: time after its creation until it is cancelled or deleted, or after its first start until it fails or
    is suspended.
    """

    name: str
    nodes: int
    gpus_per_node: int
    priority: str
    start_seconds: float
    run_seconds: float
    action: JobAction
    action_seconds: float

    @property
    def gpus(self) -> int:
        return self.nodes * self.gpus_per_node


def plan_queued_jobs(count: int, *, seconds: float, quota: int, seed: int) -> tuple[QueuedJob, ...]:
    """Plan jobs that arrive at random times; each fits into the quota."""
    random_source = random.Random(seed)
    actions = [action for action, share in ACTION_SHARES.items() for _ in range(round(share * count))]
    actions += [JobAction.NONE] * (count - len(actions))
    random_source.shuffle(actions)
    starts = sorted(random_source.uniform(0, seconds) for _ in range(count))
    return tuple(
        _plan_job(f"job-{number:03}", start, action, quota, random_source)
        for number, (start, action) in enumerate(zip(starts, actions, strict=True))
    )


def _plan_job(name: str, start: float, action: JobAction, quota: int, random_source: random.Random) -> QueuedJob:
    nodes, gpus = quota + 1, 1
    while nodes * gpus > quota:
        (nodes,) = random_source.choices(tuple(NODE_WEIGHTS), weights=tuple(NODE_WEIGHTS.values()))
        (gpus,) = random_source.choices(tuple(GPU_WEIGHTS), weights=tuple(GPU_WEIGHTS.values()))
    (priority,) = random_source.choices(tuple(PRIORITIES), weights=PRIORITY_WEIGHTS)
    run_seconds = random_source.uniform(MIN_RUN_SECONDS, MAX_RUN_SECONDS)
    action_seconds = random_source.uniform(1, MAX_ACTION_SECONDS)
    if action in (JobAction.FAIL, JobAction.SUSPEND):
        run_seconds = max(run_seconds, MIN_DISTURBED_SECONDS)
        action_seconds = run_seconds * random_source.uniform(0.2, 0.7)
    return QueuedJob(name, nodes, gpus, priority, start, run_seconds, action, action_seconds)


def build_queued_job(plan: QueuedJob) -> RawBody:
    """Return the body of a job in the queue, whose pods run on kwok nodes."""
    return {
        "apiVersion": names.API_VERSION,
        "kind": names.FINETUNEJOB_KIND,
        "metadata": {"name": plan.name, "namespace": NAMESPACE},
        "spec": {
            "image": "localhost/none:v0",
            "command": {"exec": ["train"]},
            "numNodes": plan.nodes,
            "resources": {"limits": {GPU: plan.gpus_per_node}},
            "restartPolicy": RESTART_POLICY,
            "podTemplate": FAKE_POD_FIELDS,
            "scheduling": {"queueName": QUEUE, "priorityClassName": plan.priority},
        },
    }
