"""Builders of jobs, pods and observations with default values."""

from datetime import UTC, datetime, timedelta
from typing import Any

from finetune_api.v1alpha1.job import FineTuneJob, TrainerSpec
from finetune_api.v1alpha1.status import JobStatus
from finetune_operator.core.decide import decide
from finetune_operator.core.decision import Decision
from finetune_operator.observation.pods import Observation, observe_pods
from finetune_operator.plan.manifests import build_service
from finetune_operator.plan.pod_manifest import build_pod
from finetune_operator.plan.run_plan import plan_run
from finetune_operator.settings import Settings

NOW = datetime(2026, 1, 1, 12, 0, tzinfo=UTC)
SETTINGS = Settings(trainer_image="registry.example/trainer:v1", supervisor="UEsDBA==")
UID = "11111111-2222-3333-4444-555555555555"

RawBody = dict[str, Any]


def spec(**fields: Any) -> RawBody:
    """Return a valid spec for two nodes with two ranks each, updated with `fields` (camelCase)."""
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


def parse_spec(**fields: Any) -> TrainerSpec:
    """Return the parsed spec() of a job of the operator's trainer."""
    return TrainerSpec.model_validate(spec(**fields))


def command(program: RawBody, **fields: Any) -> RawBody:
    """Return spec fields of a command-mode job; trainer fields are None, so that builders remove them."""
    removed = dict.fromkeys(("model", "dataset", "sft", "lora", "training"))
    return {**removed, "image": "registry.example/minimind:1", "command": program, **fields}


def job(*, status: JobStatus | None = None, name: str = "bert", deleted: bool = False, **fields: Any) -> FineTuneJob:
    """Return a parsed job; None removes a field from the spec."""
    metadata = {"name": name, "namespace": "default", "uid": UID, "generation": 1, "resourceVersion": "1"}
    if deleted:
        metadata["deletionTimestamp"] = NOW.isoformat()
    present_fields = {name: value for name, value in spec(**fields).items() if value is not None}
    parsed = FineTuneJob.parse({"metadata": metadata, "spec": present_fields})
    return parsed.model_copy(update={"status": status}) if status is not None else parsed


def pod(owner: FineTuneJob, node_rank: int, *, attempt: int = 0, **status_fields: Any) -> RawBody:
    """Return the raw body of a pending pod, whose status is updated with `status_fields`."""
    run = plan_run(owner, attempt=attempt, settings=SETTINGS)
    body: RawBody = build_pod(run, run.nodes[node_rank])
    body["metadata"]["uid"] = f"pod-{attempt}-{node_rank}"
    body["spec"]["nodeName"] = f"gpu-{node_rank}"
    body["status"] = {"phase": "Pending", **status_fields}
    return body


def running_pod(
    owner: FineTuneJob, node_rank: int, *, attempt: int = 0, started_at: datetime = NOW - timedelta(minutes=1)
) -> RawBody:
    """Return a pod whose trainer container is running."""
    state = [{"name": "trainer", "state": {"running": {"startedAt": started_at.isoformat()}}}]
    return pod(owner, node_rank, attempt=attempt, phase="Running", containerStatuses=state)


def finished_pod(
    owner: FineTuneJob, node_rank: int, *, attempt: int = 0, exit_code: int = 1, **terminated_fields: Any
) -> RawBody:
    """Return a pod whose trainer container has terminated; `message` may be a termination message (JSON)."""
    state = {"exitCode": exit_code, "reason": "Error" if exit_code else "Completed", **terminated_fields}
    statuses = [{"name": "trainer", "state": {"terminated": state}}]
    return pod(
        owner, node_rank, attempt=attempt, phase="Failed" if exit_code else "Succeeded", containerStatuses=statuses
    )


def terminating_pod(pod_body: RawBody, *, deadline: datetime = NOW + timedelta(seconds=30)) -> RawBody:
    """Return a copy of the pod with a deletion timestamp."""
    return {**pod_body, "metadata": {**pod_body["metadata"], "deletionTimestamp": deadline.isoformat()}}


def build_observation(
    owner: FineTuneJob, *pods: RawBody, tombstones: tuple[RawBody, ...] = (), is_fresh: bool = True, **fields: Any
) -> Observation:
    """Return an observation of these existing and deleted pods, in which the Service exists."""
    assert build_service(plan_run(owner, attempt=0, settings=SETTINGS))["metadata"]["name"] == owner.metadata.name
    return Observation(nodes=observe_pods(pods, tombstones), service_exists=True, is_fresh=is_fresh, **fields)


def decide_once(
    owner: FineTuneJob, observation: Observation, *, now: datetime = NOW, settings: Settings = SETTINGS
) -> tuple[FineTuneJob, Decision]:
    """Call decide() once; return the job with the new status, and the decision.

    The status has no start keys, like that of another release, because the pods of the builders have none.
    """
    decision = decide(owner, observation, now, settings)
    attempts = tuple(record.model_copy(update={"start_key": ""}) for record in decision.status.attempts)
    return owner.model_copy(update={"status": decision.status.model_copy(update={"attempts": attempts})}), decision


def decide_with(
    owner: FineTuneJob, *pods: RawBody, now: datetime = NOW, settings: Settings = SETTINGS, **fields: Any
) -> tuple[FineTuneJob, Decision]:
    """Call decide_once() with build_observation() of these pods and fields."""
    return decide_once(owner, build_observation(owner, *pods, **fields), now=now, settings=settings)
