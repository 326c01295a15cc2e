"""Incidents caused by other tenants of the namespace of a job: decoys, forged objects and slow webhooks."""

from finetune_operator import names
from testing.simulator.incidents.job_incidents import Incident, recover_later
from testing.simulator.incidents.user_interference import exhaust_quota
from testing.simulator.world.apiserver import ObjectKey, RawBody
from testing.simulator.world.job import SimulatedJob
from testing.simulator.world.kubernetes_nodes import FORGED_KEY, STRANGERS_SCHEDULER
from testing.simulator.world.world import World

RUNNING_DECOY: tuple[str, RawBody] = ("Running", {"running": {"startedAt": "2026-01-01T12:00:00Z"}})
FORGED_RANK = 7  # of no node of a simulated job
DECOY_STATES: tuple[tuple[str, RawBody], ...] = (
    *(2 * (RUNNING_DECOY,)),
    ("Failed", {"terminated": {"exitCode": 1, "reason": "Error", "message": '{"final":true,"outcome":"failed"}'}}),
    ("Succeeded", {"terminated": {"exitCode": 0, "reason": "Completed", "message": '{"outcome":"succeeded"}'}}),
)


def create_decoy_pod(world: World, job: SimulatedJob) -> None:
    """Create a pod with the labels of the job's node 0, whose /status response reports a large step."""
    attempt = job.status.get("attempt") or 0
    world.server.pod_quotas.pop(job.key.namespace, None)
    key = ObjectKey("Pod", job.key.namespace, f"decoy-{job.key.name}-{attempt}-0")
    labels = {
        names.JOB_NAME: job.key.name,
        names.JOB_UID: job.uid,
        names.ATTEMPT: str(attempt),
        names.NODE_RANK: "0",
        names.MANAGED_BY: names.MANAGER,
    }
    if world.server.get(key) is None:
        metadata = {"name": key.name, "namespace": key.namespace, "labels": labels}
        spec = {"schedulerName": STRANGERS_SCHEDULER}
        world.server.create({"kind": "Pod", "apiVersion": "v1", "metadata": metadata, "spec": spec}, actor="stranger")
    phase, state = world.choices.pick(DECOY_STATES)
    statuses = [{"name": names.CONTAINER, "state": state}]
    status = {"phase": phase, "podIP": world.get_decoy_ip(job), "containerStatuses": statuses}
    world.server.replace_fields(key, actor="stranger", status=status)


def forge_pod(world: World, job: SimulatedJob) -> None:
    """Create a pod that the job seems to control, with its start key: of another rank, or replacing a recorded one."""
    record = (job.status.get("attempts") or [{"attempt": 0}])[-1]
    attempt, rank = record["attempt"], world.choices.pick((FORGED_RANK, 0)) if record.get("podUids") else FORGED_RANK
    key = ObjectKey("Pod", job.key.namespace, names.pod_name(job.key.name, attempt, rank))
    if job.body is None:
        return
    world.delete(key, {"gracePeriodSeconds": 0})
    world.server.pod_quotas.pop(job.key.namespace, None)
    owner = {"apiVersion": names.API_VERSION, "kind": names.FINETUNEJOB_KIND, "name": job.key.name, "uid": job.uid}
    labels = {names.JOB_NAME: job.key.name, names.JOB_UID: job.uid, names.ATTEMPT: str(attempt)}
    metadata = {
        "name": key.name,
        "namespace": key.namespace,
        "labels": {**labels, names.NODE_RANK: str(rank)},
        "annotations": {names.START_KEY: record.get("startKey", "")},
        "ownerReferences": [{**owner, "controller": True}],
    }
    spec = {"schedulerName": STRANGERS_SCHEDULER}
    world.server.create({"kind": "Pod", "apiVersion": "v1", "metadata": metadata, "spec": spec}, actor="stranger")
    phase, state = world.choices.pick(DECOY_STATES)
    status = {"phase": phase, "containerStatuses": [{"name": names.CONTAINER, "state": state}]}
    world.server.replace_fields(key, actor="stranger", status=status)


def delete_decoy_pods(world: World, job: SimulatedJob) -> None:
    """Delete the decoy pods of the job."""
    for key, _ in list(world.server.list_objects("Pod")):
        if key.name.startswith(f"decoy-{job.key.name}-") and key.namespace == job.key.namespace:
            world.server.remove(key, actor="stranger")


def forge_config_map(world: World, job: SimulatedJob) -> None:
    """Create the ConfigMap of the next attempt with an owner reference to the job and another program."""
    attempt = job.status.get("attempt")
    number = 0 if attempt is None else attempt + 1
    key = ObjectKey("ConfigMap", job.key.namespace, names.config_map_name(job.key.name, job.uid, number))
    if job.body is None or world.server.get(key) is not None:
        return
    owner = {"apiVersion": names.API_VERSION, "kind": names.FINETUNEJOB_KIND, "name": job.key.name, "uid": job.uid}
    metadata = {
        "name": key.name,
        "namespace": key.namespace,
        "labels": {names.JOB_UID: job.uid},
        "ownerReferences": [{**owner, "controller": True}],
    }
    manifest = {"kind": "ConfigMap", "apiVersion": "v1", "metadata": metadata, "immutable": True}
    world.server.create({**manifest, "data": {names.CONFIG_KEY: "{}", FORGED_KEY: "yes"}}, actor="stranger")


def slow_down_creates(world: World, job: SimulatedJob) -> None:
    """Temporarily make the admission webhooks of the job's namespace slow."""
    namespace = job.key.namespace
    world.slow_creates[namespace] = world.choices.pick((5.0, 12.0, 25.0))
    recover_later(world, lambda: world.slow_creates.pop(namespace, None))


STRANGERS: tuple[Incident, ...] = (  # an incident that is listed several times is drawn more often
    *(2 * (create_decoy_pod, forge_config_map, forge_pod, slow_down_creates)),
    exhaust_quota,
    delete_decoy_pods,
)
