"""Incidents of Kueue: preemption by other tenants, deactivation, timeouts, and outages."""

from finetune_operator import names
from testing.simulator.incidents.job_incidents import Incident, recover_later
from testing.simulator.world.apiserver import ObjectKey
from testing.simulator.world.cluster_queue import KUEUE, PRIORITIES
from testing.simulator.world.job import SimulatedJob
from testing.simulator.world.world import World

COMPETITOR_PRIORITY = 2 * max(PRIORITIES.values())


def preempt_by_competitor(world: World, job: SimulatedJob) -> None:
    """Temporarily submit a Workload of another tenant with the highest priority."""
    pods = 1 + world.choices.draw_number(world.kueue.queue.quota)
    key = world.kueue.submit_competitor(pods=pods, priority=COMPETITOR_PRIORITY)
    recover_later(world, lambda: world.server.remove(key, actor=KUEUE))


def deactivate_workload(world: World, job: SimulatedJob) -> None:
    """Temporarily set active: false in the Workload of the job."""
    key = get_workload_key(job)
    world.kueue.set_active(key, active=False)
    recover_later(world, lambda: world.kueue.set_active(key, active=True))


def evict_workload(world: World, job: SimulatedJob) -> None:
    """Evict the Workload of the job, as Kueue does if its pods are not ready in time."""
    world.kueue.queue.evict(get_workload_key(job), "PodsReadyTimeout", "Exceeded the PodsReady timeout")


def stop_kueue(world: World, job: SimulatedJob) -> None:
    """Temporarily stop Kueue, whose webhook then rejects pods."""
    world.kueue.is_running = False

    def restart() -> None:
        world.kueue.is_running = True

    recover_later(world, restart)


def get_workload_key(job: SimulatedJob) -> ObjectKey:
    """Return the key of the Workload of the current job."""
    return ObjectKey(names.WORKLOAD_KIND, job.key.namespace, names.workload_name(job.key.name, job.uid))


PREEMPTIONS: tuple[Incident, ...] = (*(4 * (preempt_by_competitor,)), deactivate_workload)

QUEUE_INCIDENTS: tuple[Incident, ...] = (  # an incident that is listed several times is drawn more often
    *(3 * (preempt_by_competitor,)),
    *(2 * (deactivate_workload, evict_workload)),
    stop_kueue,
)
