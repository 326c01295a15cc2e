"""Which histories there are, as hypothesis draws them: each has only some kinds of trouble, so that they go deep."""

from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st

from support.simulator.history import Moment, Scenario
from support.simulator.incidents import (
    INCIDENTS,
    OPERATOR_INCIDENTS,
    Incident,
    container_killed,
    machine_without_power,
    operator_crashed,
    pod_deleted,
    rank_killed,
    suspended_for_a_while,
)
from support.simulator.network import CALM, Weather
from support.simulator.trainer import Workload

MOST_INCIDENTS = 6

moments = st.one_of(
    st.builds(Moment, seconds=st.sampled_from((3.0, 8.0, 0.02, 0.3, 1.0, 5.0, 10.0, 12.0, 14.0, 16.0, 25.0, 70.0))),
    st.builds(Moment, seconds=st.sampled_from((0.0, 0.0015, 0.05, 1.0, 3.0)), commits=st.integers(4, 40)),
)
overlaps = st.tuples(moments, st.sampled_from((0.1, 0.01, 2.0, 15.0)))


def rates(*percentages: float) -> st.SearchStrategy[float]:
    """Mostly none at all."""
    return st.sampled_from((0.0, 0.0, *percentages))


weathers = st.builds(
    Weather,
    slow=rates(10.0, 50.0),
    refused=rates(5.0, 20.0),
    lost=rates(5.0, 20.0),
    crash=rates(2.0, 10.0),
    lag=rates(10.0, 50.0),
    broken=rates(5.0, 20.0),
    repeated=rates(10.0),
)

policies = st.fixed_dictionaries(
    {
        "maxRestarts": st.sampled_from((1, 0, 3)),
        "maxInfrastructureRestarts": st.sampled_from((1, 0, 3)),
        "backoffSeconds": st.sampled_from((1, 0, 10)),
        "maxBackoffSeconds": st.just(20),
    }
)


@st.composite
def fields(draw: st.DrawFn) -> dict[str, Any]:
    """What the spec says besides the workload."""
    chosen: dict[str, Any] = {"restartPolicy": draw(policies)}
    for name, values in (
        ("activeDeadlineSeconds", (None, None, None, 5, 20, 60)),
        ("ttlSecondsAfterFinished", (None, None, None, None, None, None, 0, 5, 60)),
        ("suspend", (None, None, None, None, True)),
    ):
        value = draw(st.sampled_from(values))
        if value is not None:
            chosen[name] = value
    return chosen


def scenarios(
    *,
    weather: st.SearchStrategy[Weather] = weathers,
    incidents: Sequence[Incident] = INCIDENTS,
    takeovers: bool = False,
) -> st.SearchStrategy[Scenario]:
    """Any history, of one operator at a time or of several that each believe that they lead."""
    return st.builds(
        Scenario,
        workload=st.builds(Workload, num_nodes=st.sampled_from((2, 1, 3)), total_steps=st.sampled_from((6, 15))),
        fields=fields(),
        weather=weather,
        incidents=happenings(incidents),
        takeovers=st.lists(overlaps, min_size=1, max_size=3).map(tuple) if takeovers else st.just(()),
        resume_at_end=st.sampled_from((True, True, True, False)),
        faults_end=st.sampled_from((60.0, 240.0)),
    )


def operator_troubles() -> st.SearchStrategy[Scenario]:
    """Histories in which only the operator and its way to the API server have trouble."""
    return st.builds(
        Scenario,
        workload=st.builds(Workload, num_nodes=st.sampled_from((2, 1, 3)), patience_seconds=st.just(3600.0)),
        weather=weathers,
        incidents=happenings(OPERATOR_INCIDENTS),
        takeovers=st.one_of(st.just(()), st.lists(overlaps, max_size=2).map(tuple)),
    )


def stale_caches() -> st.SearchStrategy[Scenario]:
    """Histories in which operators and users act while the watches are far behind."""
    weather = st.builds(Weather, slow=rates(10.0), crash=rates(5.0), lag=st.sampled_from((50.0, 90.0)))
    return scenarios(
        weather=weather, incidents=(suspended_for_a_while, operator_crashed, container_killed, pod_deleted)
    )


def failing_nodes() -> st.SearchStrategy[Scenario]:
    """Histories in which nodes fail and everything else goes well."""
    return scenarios(weather=st.just(CALM), incidents=(container_killed, rank_killed, machine_without_power))


def happenings(incidents: Sequence[Incident]) -> st.SearchStrategy[tuple[tuple[Moment, Incident], ...]]:
    """Some of these incidents, each at its moment."""
    return st.lists(st.tuples(moments, st.sampled_from(incidents)), max_size=MOST_INCIDENTS).map(tuple)
