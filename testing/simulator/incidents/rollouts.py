"""Rollouts of another release of the operator."""

from testing.simulator.incidents.job_incidents import Incident, crash_operator, edit_job_under_brief_suspension
from testing.simulator.incidents.operator_pauses import pause_operator
from testing.simulator.incidents.user_interference import exhaust_quota, recreate_job
from testing.simulator.world.job import SimulatedJob
from testing.simulator.world.releases import THIS_RELEASE, load_next_release
from testing.simulator.world.world import World


def roll_out_other_release(world: World, job: SimulatedJob) -> None:
    """Upgrade the operator to the next release, or roll it back."""
    release = load_next_release() if world.release is THIS_RELEASE else THIS_RELEASE
    world.roll_out(release, delay_seconds=world.choices.pick((5.0, 1.0, 30.0)))


ROLLOUTS: tuple[Incident, ...] = (  # an incident that is listed several times is drawn more often
    *(6 * (roll_out_other_release,)),
    *(2 * (edit_job_under_brief_suspension,)),
    *(2 * (exhaust_quota,)),
    recreate_job,
    pause_operator,
    crash_operator,
)
