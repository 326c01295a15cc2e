"""Incidents caused by users, trainers and operators; node_incidents.py contains those of Kubernetes nodes."""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from finetune_operator import names
from finetune_operator.kube.api_client import ApiError
from testing.simulator.world.apiserver import ObjectKey
from testing.simulator.world.job import SimulatedJob
from testing.simulator.world.world import World

RECOVERY_DELAYS_SECONDS = (10.0, 100.0, 400.0)
ERROR_TYPES = ("RuntimeError", "CudaError", "NonFiniteLoss")

PREEMPTOR = "527a9fa8-fb86-4116-b295-4f4dd72e478f"  # uid of a workload

Incident = Callable[[World, SimulatedJob], None]


def recover_later(world: World, recover: Callable[[], object]) -> None:
    """Call `recover` after a random time, at the latest when the faults end."""

    def recover_once() -> None:
        if recover in world.pending_recoveries:
            world.pending_recoveries.remove(recover)
            recover()

    world.pending_recoveries.append(recover)
    asyncio.get_running_loop().call_later(world.choices.pick(RECOVERY_DELAYS_SECONDS), recover_once)


def delete_pod(world: World, job: SimulatedJob) -> None:
    """Delete a pod, as `kubectl delete pod` does."""
    if picked := job.pick_pod():
        world.delete(picked[0], {})


def force_delete_pod(world: World, job: SimulatedJob) -> None:
    """Remove a pod object immediately, as `kubectl delete pod --force` does, while its processes still run."""
    if picked := job.pick_pod():
        world.delete(picked[0], {"gracePeriodSeconds": 0})


def evict_pod(world: World, job: SimulatedJob) -> None:
    """Evict a pod, as `kubectl drain` does."""
    if picked := job.pick_pod():
        world.node_controllers.disrupt_pod(picked[0], "EvictionByEvictionAPI")


def evict_pod_by_taint(world: World, job: SimulatedJob) -> None:
    """Evict a pod as a NoExecute taint does, while the kubelet of its node is healthy."""
    if picked := job.pick_pod():
        world.node_controllers.disrupt_pod(picked[0], "DeletionByTaintManager")


def preempt_by_kueue(world: World, job: SimulatedJob) -> None:
    """Evict all pods, as Kueue does in favour of another workload."""
    message = f"Preempted to accommodate a workload (UID: {PREEMPTOR}, JobUID: UNKNOWN) due to prioritization"
    world.node_controllers.evict_by_kueue([key for key, _ in job.list_pods()], "WorkloadEvictedDueToPreempted", message)


def evict_by_kueue(world: World, job: SimulatedJob) -> None:
    """Evict all pods, as Kueue does if they are not ready in time."""
    message = "Exceeded the PodsReady timeout default/bert"
    world.node_controllers.evict_by_kueue(
        [key for key, _ in job.list_pods()], "WorkloadEvictedDueToPodsReadyTimeout", message
    )


def suspend_job(world: World, job: SimulatedJob) -> None:
    """Set spec.suspend to true."""
    job.edit_spec(suspend=True)


def suspend_job_temporarily(world: World, job: SimulatedJob) -> None:
    """Set spec.suspend to true, and later to false."""
    job.edit_spec(suspend=True)
    recover_later(world, lambda: job.edit_spec(suspend=False))


def cancel_job(world: World, job: SimulatedJob) -> None:
    """Set spec.cancel to true."""
    job.edit_spec(cancel=True)


def edit_job_under_brief_suspension(world: World, job: SimulatedJob) -> None:
    """Suspend the job, change its image, shared memory or size, and resume it, often while no operator runs."""
    if not world.choices.draw_boolean(25):
        for operator in tuple(world.operators):
            world.crash(operator)
    changes: tuple[dict[str, Any], ...] = (
        {"image": "registry.example/other:v1"},
        {"shmSize": "1Gi"},
        *({"numNodes": count} for count in (1, 2, 3)),
    )
    job.edit_spec(suspend=True)
    job.edit_spec(**world.choices.pick(changes))
    job.edit_spec(suspend=False)


def resume_job(world: World, job: SimulatedJob) -> None:
    """Set spec.suspend to false."""
    job.edit_spec(suspend=False)


def edit_annotation(world: World, job: SimulatedJob) -> None:
    """Change an annotation of the job."""
    job.edit_annotation()


def delete_job(world: World, job: SimulatedJob) -> None:
    """Delete the job with background or foreground propagation."""
    world.delete(job.key, {"propagationPolicy": world.choices.pick(("Background", "Foreground"))})


def kill_rank(world: World, job: SimulatedJob) -> None:
    """Kill a rank with SIGKILL; its supervisor reports the signal."""
    if process := job.pick_process():
        world.trainer.fail(process, error_type="RankKilled", message="a rank was killed", signal=9)


def raise_in_rank(world: World, job: SimulatedJob) -> None:
    """Raise an exception in a rank."""
    if process := job.pick_process():
        world.trainer.fail(process, error_type=world.choices.pick(ERROR_TYPES), message="the rank raised")


def hang_rank(world: World, job: SimulatedJob) -> None:
    """Make a rank hang, as after SIGSTOP or in a GPU kernel that never finishes."""
    if process := job.pick_process():
        world.trainer.hang(process)


def exhaust_gpu_memory(world: World, job: SimulatedJob) -> None:
    """Make a rank run out of GPU memory."""
    if process := job.pick_process():
        world.trainer.fail(process, error_type="CudaOutOfMemory", message="ran out of GPU memory")


def kill_container(world: World, job: SimulatedJob) -> None:
    """Kill the supervisor with SIGKILL."""
    if process := job.pick_process():
        world.trainer.kill(process)


def exhaust_host_memory(world: World, job: SimulatedJob) -> None:
    """Make the kernel's OOM killer kill the supervisor."""
    if process := job.pick_process():
        world.trainer.kill(process, reason="OOMKilled")


def exit_without_result(world: World, job: SimulatedJob) -> None:
    """Make the trainer exit with code 0 in the middle of training."""
    if process := job.pick_process():
        world.trainer.exit_early(process)


def block_image_pulls(world: World, job: SimulatedJob) -> None:
    """Temporarily make image pulls fail."""
    world.k8s_nodes.image_available = False

    def allow_image_pulls() -> None:
        world.k8s_nodes.image_available = True

    recover_later(world, allow_image_pulls)


def crash_operator(world: World, job: SimulatedJob) -> None:
    """Kill the process of a running operator."""
    for operator in world.operators:
        if operator.is_running:
            world.crash(operator)
            return


def partition_operator(world: World, job: SimulatedJob) -> None:
    """Temporarily disconnect the newest operator from the API server."""
    operator = world.operators[-1]
    operator.connection.is_partitioned = True

    def reconnect() -> None:
        operator.connection.is_partitioned = False

    recover_later(world, reconnect)


def take_pod_name(world: World, job: SimulatedJob) -> None:
    """Create a foreign pod with the name that the next attempt needs."""
    name = names.pod_name(job.key.name, (job.status.get("attempt") or 0) + 1, 0)
    if world.server.get(ObjectKey("Pod", job.key.namespace, name)) is None:
        metadata = {"name": name, "namespace": job.key.namespace}
        with suppress(ApiError):  # the quota of the namespace is exhausted
            world.server.create({"kind": "Pod", "apiVersion": "v1", "metadata": metadata, "spec": {}}, actor="stranger")


def replace_config_map(world: World, job: SimulatedJob) -> None:
    """Delete a ConfigMap of the job and create a foreign one with its name."""
    key = job.get_config_map_key()
    if world.server.get(key) is not None:
        world.delete(key, {})
        metadata = {"name": key.name, "namespace": key.namespace}
        world.server.create({"kind": "ConfigMap", "apiVersion": "v1", "metadata": metadata}, actor="stranger")


OPERATOR_INCIDENTS: tuple[Incident, ...] = (crash_operator, edit_annotation, partition_operator)

USER_INCIDENTS: tuple[Incident, ...] = (  # an incident that is listed several times is drawn more often
    *(4 * (suspend_job_temporarily, delete_pod)),
    *(2 * (force_delete_pod, evict_pod, evict_pod_by_taint, resume_job)),
    suspend_job,
    take_pod_name,
    replace_config_map,
    delete_job,
)

TRAINER_INCIDENTS: tuple[Incident, ...] = (
    *(4 * (kill_container, kill_rank)),
    *(2 * (exit_without_result, block_image_pulls, hang_rank, exhaust_gpu_memory)),
    raise_in_rank,
    exhaust_host_memory,
)
