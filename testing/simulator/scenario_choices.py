"""Draws the parts of scenarios: spec fields, network faults, incidents with their triggers, and takeovers."""

from collections.abc import Sequence
from typing import Any

from testing.simulator.history import Trigger
from testing.simulator.incidents.job_incidents import Incident
from testing.simulator.world.choices import Choices
from testing.simulator.world.network import NetworkFaults

MAX_INCIDENTS = 6
MAX_TAKEOVERS = 3

DELAYS_SECONDS = (3.0, 8.0, 0.02, 0.3, 1.0, 5.0, 10.0, 12.0, 14.0, 16.0, 25.0, 70.0)
DELAYS_AFTER_COMMIT_SECONDS = (0.0, 0.0015, 0.05, 1.0, 3.0)
OVERLAPS_SECONDS = (0.1, 0.01, 2.0, 15.0, 120.0)


def draw_spec_fields(choices: Choices) -> dict[str, Any]:
    """Draw the spec fields that the workload does not determine."""
    policy = {
        "maxRestarts": choices.pick((1, 0, 3)),
        "maxInfrastructureRestarts": choices.pick((1, 0, 3)),
        "backoffSeconds": choices.pick((1, 0, 10)),
        "maxBackoffSeconds": 20,
        "avoidFailingNodes": choices.pick((True, True, False)),
    }
    spec_fields: dict[str, Any] = {"restartPolicy": policy}
    for name, values in (
        ("activeDeadlineSeconds", (None, None, None, 5, 20, 60)),
        ("pendingDeadlineSeconds", (None, None, None, 5, 30, 200)),
        ("startupDeadlineSeconds", (None, 0, 20, 60)),
        ("ttlSecondsAfterFinished", (None, None, None, None, None, None, 0, 5, 60)),
        ("suspend", (None, None, None, None, True)),
    ):
        value = choices.pick(values)
        if value is not None:
            spec_fields[name] = value
    return spec_fields


def draw_network_faults(choices: Choices) -> NetworkFaults:
    return NetworkFaults(
        slow_requests=draw_rate(choices, 10.0, 50.0),
        rejected_requests=draw_rate(choices, 5.0, 20.0),
        lost_responses=draw_rate(choices, 5.0, 20.0),
        crashes=draw_rate(choices, 2.0, 10.0),
        delayed_events=draw_rate(choices, 10.0, 50.0),
        broken_watches=draw_rate(choices, 5.0, 20.0),
        repeated_events=draw_rate(choices, 10.0),
    )


def draw_rate(choices: Choices, *percentages: float) -> float:
    """Draw a fault rate in percent, which is 0 in at least half of the draws."""
    return choices.pick((0.0, 0.0, *percentages))


def draw_incidents(
    choices: Choices, incidents: Sequence[Incident], *, extra_delays: tuple[float, ...] = ()
) -> tuple[tuple[Trigger, Incident], ...]:
    """Draw up to MAX_INCIDENTS incidents with their triggers; `extra_delays`: further possible delays in seconds."""
    count = choices.draw_number(MAX_INCIDENTS + 1)
    return tuple((draw_trigger(choices, extra_delays), choices.pick(incidents)) for _ in range(count))


def draw_trigger(choices: Choices, extra_delays: tuple[float, ...] = ()) -> Trigger:
    """Draw a trigger; half of the triggers fire soon after a commit, when most races occur."""
    if choices.draw_number(2):
        return Trigger(seconds=choices.pick(DELAYS_AFTER_COMMIT_SECONDS), commit_number=4 + choices.draw_number(37))
    return Trigger(seconds=choices.pick((*DELAYS_SECONDS, *(4 * extra_delays))))


def draw_takeovers(choices: Choices, *, min_takeovers: int = 0) -> tuple[tuple[Trigger, float], ...]:
    """Draw the trigger of each leader change and the seconds for which the former leader continues to act."""
    count = min_takeovers + choices.draw_number(MAX_TAKEOVERS + 1 - min_takeovers)
    return tuple((draw_trigger(choices), choices.pick(OVERLAPS_SECONDS)) for _ in range(count))
