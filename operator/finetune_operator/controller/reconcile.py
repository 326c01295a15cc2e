"""The short shell around decide: observe, decide, write the status, then act."""

import asyncio
import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any

from pydantic import ValidationError

from finetune_api.schema.validation_errors import explain
from finetune_api.v1alpha1.job import FineTuneJob, ObjectMeta
from finetune_api.v1alpha1.status import AttemptState, JobStatus, Progress
from finetune_operator import names
from finetune_operator.core.actions import Action, Create, DeleteConfigMap, DeleteJob, DeletePod, DeleteService, Emit
from finetune_operator.core.conditions import essence
from finetune_operator.core.decide import decide
from finetune_operator.core.invalid_spec import decide_invalid
from finetune_operator.core.pending import claim_names
from finetune_operator.kube.cluster import Cluster, ClusterError, NameTaken, ObjectRef, Refused
from finetune_operator.observation.pods import Claim, Observation, Refusal, controller, observe_pods
from finetune_operator.plan.manifests import names_pods
from finetune_operator.plan.run_plan import Settings

Raw = dict[str, Any]

BREATH = timedelta(seconds=5)
# an alarm is slept for by a clock that nobody sets; the one that it was reckoned by may be set right meanwhile
LONGEST_SLEEP = timedelta(minutes=5)


@dataclass(frozen=True)
class Seen:
    """What the watches know of a job's children; `gone` are the last objects seen of pods that were deleted."""

    pods: tuple[Raw, ...] = ()
    gone: tuple[Raw, ...] = ()
    services: tuple[Raw, ...] = ()
    progress: Progress | None = None
    unheard: str = ""  # who does not tell how far the job is, though asked for long
    refusals: tuple[Refusal, ...] = ()
    since_write: timedelta | None = None  # since the status was last written by us


@dataclass(frozen=True)
class Outcome:
    """What a pass leaves: the newest job, when to look again, and what the API server refused."""

    job: Raw
    requeue_after: timedelta | None = None
    refusals: tuple[Refusal, ...] = ()


@dataclass(frozen=True)
class Pass:
    """One pass over one job."""

    cluster: Cluster
    settings: Settings
    now: Callable[[], datetime]


async def reconcile(run: Pass, job: Raw, seen: Seen) -> Outcome:
    """One step of one job. Raises ClusterError; nothing is lost or half-made if it does."""
    try:
        parsed = FineTuneJob.parse(job)
    except ValidationError as error:
        return await _refuse(run, job, error, seen)
    observation = _observe(parsed, seen)
    decision = decide(parsed, observation, run.now(), run.settings)
    if decision.unsure:
        observation = await _look_closely(run, parsed, observation, seen)
        decision = decide(parsed, observation, run.now(), run.settings)
    changed = decision.status != parsed.status
    if changed and (pause := _can_wait(parsed.status, decision.status, seen)):
        refusals = await _perform(run, parsed.metadata, decision.actions)
        return Outcome(job, min(pause, decision.requeue_after or pause), refusals)
    if changed:
        job = await run.cluster.write_status(job, render_status(decision.status))
    refusals = await _perform(run, parsed.metadata, decision.actions)
    # after a write, the next step needs no event: what it decides from is already here
    again = timedelta() if changed or refusals != seen.refusals else decision.requeue_after
    return Outcome(job, again and min(again, LONGEST_SLEEP), refusals)


def _can_wait(before: JobStatus, after: JobStatus, seen: Seen) -> timedelta | None:
    """How long a write may wait that only people would miss: pods change in bursts, and each write is a request."""
    if seen.since_write is None or seen.since_write >= BREATH or essence(before) != essence(after):
        return None
    return BREATH - seen.since_write


def render_status(status: JobStatus) -> Raw:
    """As the API server stores it: camelCase, without what is empty; the column RESTARTS wants its zero."""
    told: Raw = status.model_dump(mode="json", by_alias=True, exclude_none=True, exclude_defaults=True)
    return {**told, "restarts": status.restarts}


def _observe(job: FineTuneJob, seen: Seen) -> Observation:
    record = job.status.attempts[-1] if job.status.attempts else None
    progress = seen.progress
    if progress and record and record.start_time and progress.update_time and progress.update_time < record.start_time:
        progress = None  # an older attempt's
    uid = job.metadata.uid
    services = _owned(uid, seen.services)
    return Observation(
        nodes=observe_pods(_owned(uid, seen.pods), _owned(uid, seen.gone)),
        service_exists=any(names_pods(service, uid) for service in services),
        edited_service=next((service["metadata"]["uid"] for service in services if not names_pods(service, uid)), ""),
        progress=progress,
        unheard=seen.unheard,
        refusals=seen.refusals,
    )


async def _look_closely(run: Pass, job: FineTuneJob, observation: Observation, seen: Seen) -> Observation:
    """The same with what no cache can prove: which pods are there now, and what the claims allow."""
    namespace, uid = job.metadata.namespace, job.metadata.uid
    wanted = claim_names(job) if job.status.attempts[-1].state is AttemptState.STARTING else ()
    claims = _get_all(run, "PersistentVolumeClaim", namespace, wanted)
    fresh, found = await asyncio.gather(run.cluster.list_pods(namespace, uid), claims)
    gone = _owned(uid, (*seen.gone, *seen.pods))  # of one that is gone, the cache has the last word
    listed = replace(observation, nodes=observe_pods(_owned(uid, fresh), gone))
    hidden = await _get_all(run, "Pod", namespace, _missed(job, listed))
    return replace(
        observation,
        nodes=observe_pods(_owned(uid, (*fresh, *hidden)), gone),
        claims=tuple(
            Claim(claim["metadata"]["name"], tuple(claim.get("spec", {}).get("accessModes") or ())) for claim in found
        ),
        fresh=True,
    )


async def _get_all(run: Pass, kind: str, namespace: str, wanted: Iterable[str]) -> list[Raw]:
    found = await asyncio.gather(*(run.cluster.get(kind, namespace, name) for name in wanted))
    return [body for body in found if body is not None]


def _missed(job: FineTuneJob, listed: Observation) -> list[str]:
    """Pods of the present attempt that no list shows although nobody saw them end or be deleted.

    Maybe somebody edited their labels; their names are as good as ever.
    """
    record = job.status.attempts[-1]
    if not record.created and record.state is not AttemptState.STOPPING:
        return []
    known = {node.node_rank for node in listed.of_attempt(record.attempt) if not node.missed}
    ranks = range(len(record.evidence) or job.spec.num_nodes)
    return [names.pod_name(job.metadata.name, record.attempt, rank) for rank in ranks if rank not in known]


def _owned(uid: str, bodies: Iterable[Raw]) -> list[Raw]:
    return [body for body in bodies if controller(body) == uid]


async def _perform(run: Pass, job: ObjectMeta, actions: tuple[Action, ...]) -> tuple[Refusal, ...]:
    """All at once, but pods come last, and not while somebody else's ConfigMap has the name that they would mount."""
    refusals = await _try_all(run, job, [action for action in actions if not _makes_pod(action)])
    if any(refusal.kind == "ConfigMap" for refusal in refusals):
        return refusals
    return (*refusals, *await _try_all(run, job, [action for action in actions if _makes_pod(action)]))


def _makes_pod(action: Action) -> bool:
    return isinstance(action, Create) and action.manifest["kind"] == "Pod"


async def _try_all(run: Pass, job: ObjectMeta, actions: list[Action]) -> tuple[Refusal, ...]:
    """Every one is tried before an error is raised."""
    results = await asyncio.gather(*(_act(run, job, action) for action in actions), return_exceptions=True)
    refusals = []
    for result in results:
        if isinstance(result, NameTaken):
            taken, leaving = not result.leaving, result.leaving
            refusals.append(Refusal(result.kind, result.name, 409, str(result), taken=taken, leaving=leaving))
        elif isinstance(result, Refused):
            refusals.append(Refusal(result.kind, result.name, result.status, result.message))
        elif isinstance(result, BaseException):
            raise result
    return tuple(refusals)


async def _act(run: Pass, job: ObjectMeta, action: Action) -> None:
    namespace = job.namespace
    match action:
        case Create(manifest):
            await run.cluster.create(manifest)
        case DeletePod(name, uid, grace_seconds):
            await run.cluster.delete(ObjectRef("Pod", namespace, name, uid), grace_seconds=grace_seconds)
        case DeleteService(name, uid):
            await run.cluster.delete(ObjectRef("Service", namespace, name, uid))
        case DeleteConfigMap(name):
            await run.cluster.delete(ObjectRef("ConfigMap", namespace, name, ""))
        case DeleteJob(uid):
            await run.cluster.delete(ObjectRef(names.FINETUNEJOB_KIND, namespace, job.name, uid))
        case Emit():
            await run.cluster.emit_event(build_event(job, action, run.now()))


def build_event(job: ObjectMeta, emit: Emit, now: datetime) -> Raw:
    """An Event about the job, named after what it tells, so that the API server refuses a repetition."""
    digest = hashlib.sha256(f"{job.uid}/{emit.key}".encode()).hexdigest()[:16]
    stamp = now.strftime("%Y-%m-%dT%H:%M:%SZ")
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": f"{job.name}.{digest}", "namespace": job.namespace},
        "involvedObject": {
            "apiVersion": names.API_VERSION,
            "kind": names.FINETUNEJOB_KIND,
            "name": job.name,
            "namespace": job.namespace,
            "uid": job.uid,
        },
        "type": emit.type,
        "reason": emit.reason,
        "message": emit.message[:1024],
        "source": {"component": names.MANAGER},
        "reportingComponent": names.MANAGER,
        "firstTimestamp": stamp,
        "lastTimestamp": stamp,
        "count": 1,
    }


async def _refuse(run: Pass, job: Raw, error: ValidationError, seen: Seen) -> Outcome:
    """A spec that cannot be read: Failed, once, in words, and nothing of it runs on."""
    try:
        status = JobStatus.model_validate(job.get("status") or {})
    except ValidationError as unreadable:  # only another release of the operator can have written it
        problems = explain(unreadable, within="status")
        raise ClusterError(f"status cannot be read, the job is left alone: {problems}") from unreadable
    metadata = ObjectMeta.model_validate(job["metadata"])
    if metadata.deletion_timestamp is not None:
        return Outcome(job)
    pods = Observation(nodes=observe_pods(_owned(metadata.uid, seen.pods), ()))
    decision = decide_invalid(status, error, pods, run.now(), generation=metadata.generation)
    if decision.status != status:
        job = await run.cluster.write_status(job, render_status(decision.status))
    await _perform(run, metadata, decision.actions)
    return Outcome(job)
