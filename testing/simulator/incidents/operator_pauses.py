"""Pauses of operator processes, and jumps of their wall clocks."""

from testing.simulator.incidents.job_incidents import Incident, crash_operator, edit_annotation
from testing.simulator.incidents.user_interference import shift_operator_clock
from testing.simulator.world.job import SimulatedJob
from testing.simulator.world.world import World

PAUSES_SECONDS = (4.0, 9.0, 10.5, 12.0, 14.0, 20.0, 40.0, 60.0)  # a lease is lost after 10 s and expires after 15 s


def pause_operator(world: World, job: SimulatedJob) -> None:
    """Pause the newest running operator, or the one that leads."""
    running = [operator for operator in world.operators if operator.is_running and not operator.process.is_paused]
    leading = [operator for operator in running if operator.manager.is_leading]
    if running:
        world.pause((leading or running)[-1], world.choices.pick(PAUSES_SECONDS))


OPERATOR_PAUSES: tuple[Incident, ...] = (
    *(4 * (pause_operator,)),
    shift_operator_clock,
    crash_operator,
    edit_annotation,
)
