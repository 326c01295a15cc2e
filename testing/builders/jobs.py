"""Builders: set what a test is about, default the rest."""

from datetime import UTC, datetime, timedelta
from typing import Any

from finetune_api.v1alpha1.job import FineTuneJob
from finetune_api.v1alpha1.status import JobStatus
from finetune_operator.core.decide import decide
from finetune_operator.core.job_context import Decision
from finetune_operator.observation.pods import Observation, observe_pods
from finetune_operator.plan.manifests import build_pod, build_service
from finetune_operator.plan.run_plan import Settings, plan_run

NOW = datetime(2026, 1, 1, 12, 0, tzinfo=UTC)
SETTINGS = Settings(trainer_image="registry.example/trainer:v1", supervisor="UEsDBA==")
UID = "11111111-2222-3333-4444-555555555555"

Raw = dict[str, Any]


def spec(**fields: Any) -> Raw:
    """A valid spec: 2 nodes of 2 ranks, with `fields` (camelCase) laid over it."""
    return {
        "model": {"name": "/data/model"},
        "dataset": {"train": [{"name": "/data/train.jsonl"}]},
        "sft": {},
        "lora": {},
        "numNodes": 2,
        "nprocPerNode": 2,
        "volumes": [{"name": "data", "mountPath": "/data", "persistentVolumeClaim": {"claimName": "datasets"}}],
        "output": {"persistentVolumeClaim": {"claimName": "models"}},
        **fields,
    }


def command(program: Raw, **fields: Any) -> Raw:
    """Fields that make of the valid spec one that brings its own program, and so nothing of the trainer's."""
    ours = dict.fromkeys(("model", "dataset", "sft", "lora", "training"))
    return {**ours, "image": "registry.example/minimind:1", "command": program, **fields}


def job(*, status: JobStatus | None = None, name: str = "bert", deleted: bool = False, **fields: Any) -> FineTuneJob:
    """A job as the operator reads it."""
    metadata = {"name": name, "namespace": "default", "uid": UID, "generation": 1, "resourceVersion": "1"}
    if deleted:
        metadata["deletionTimestamp"] = NOW.isoformat()
    wanted = {name: value for name, value in spec(**fields).items() if value is not None}
    parsed = FineTuneJob.parse({"metadata": metadata, "spec": wanted})
    return parsed.model_copy(update={"status": status}) if status is not None else parsed


def pod(of: FineTuneJob, node_rank: int, *, attempt: int = 0, **status: Any) -> Raw:
    """The pod of a node as the API shows it: pending, unless `status` says more."""
    run = plan_run(of, attempt=attempt, settings=SETTINGS)
    body: Raw = build_pod(run, run.nodes[node_rank])
    body["metadata"]["uid"] = f"pod-{attempt}-{node_rank}"
    body["spec"]["nodeName"] = f"gpu-{node_rank}"
    body["status"] = {"phase": "Pending", **status}
    return body


def running(of: FineTuneJob, node_rank: int, *, attempt: int = 0) -> Raw:
    """A pod whose trainer runs."""
    state = [{"name": "trainer", "state": {"running": {"startedAt": "2026-01-01T12:00:00Z"}}}]
    return pod(of, node_rank, attempt=attempt, phase="Running", containerStatuses=state)


def ended(of: FineTuneJob, node_rank: int, *, attempt: int = 0, exit_code: int = 1, **terminated: Any) -> Raw:
    """A pod whose trainer ended; `message` may be the supervisor's JSON."""
    state = {"exitCode": exit_code, "reason": "Error" if exit_code else "Completed", **terminated}
    statuses = [{"name": "trainer", "state": {"terminated": state}}]
    return pod(of, node_rank, attempt=attempt, phase="Failed" if exit_code else "Succeeded", containerStatuses=statuses)


def deleting(body: Raw, *, deadline: datetime = NOW + timedelta(seconds=30)) -> Raw:
    """The same pod with a deletion under way."""
    return {**body, "metadata": {**body["metadata"], "deletionTimestamp": deadline.isoformat()}}


def seen(of: FineTuneJob, *pods: Raw, gone: tuple[Raw, ...] = (), fresh: bool = True, **fields: Any) -> Observation:
    """An observation with these pods and the job's Service."""
    assert build_service(plan_run(of, attempt=0, settings=SETTINGS))["metadata"]["name"] == of.metadata.name
    return Observation(nodes=observe_pods(pods, gone), service_exists=True, fresh=fresh, **fields)


def step(
    of: FineTuneJob, observation: Observation, *, now: datetime = NOW, settings: Settings = SETTINGS
) -> tuple[FineTuneJob, Decision]:
    """One decision, and the job as it is once the status is written."""
    decision = decide(of, observation, now, settings)
    return of.model_copy(update={"status": decision.status}), decision
