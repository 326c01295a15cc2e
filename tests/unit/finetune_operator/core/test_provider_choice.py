"""Tests of the choice of what schedules the pods of a job as a group."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from finetune_api.v1alpha1.job import FineTuneJobSpec
from finetune_api.v1alpha1.scheduling import (
    API_VERSIONS,
    QUEUE_REQUIRED,
    WITH_QUEUE,
    WITH_TOPOLOGY,
    WITHOUT_QUEUE,
    SchedulingProvider,
)
from finetune_operator.core.provider_choice import choose_provider
from finetune_operator.observation.group_apis import GroupApis, find_group_apis
from testing.builders.jobs import job

P = SchedulingProvider
RACK = {"key": "example.com/rack"}


def serve(*providers: SchedulingProvider, problems: dict[SchedulingProvider, str] | None = None) -> GroupApis:
    return GroupApis({provider: API_VERSIONS[provider][0] for provider in providers}, problems or {})


def parse_spec(
    *, scheduler: str | None = None, topology: dict[str, str] | None = None, **fields: Any
) -> FineTuneJobSpec:
    constraints = {} if topology is None else {"schedulingConstraints": {"topology": [topology]}}
    template = None if scheduler is None else {"schedulerName": scheduler}
    return job(scheduling={**fields, **constraints}, podTemplate=template).spec


def choose(apis: GroupApis, **fields: Any) -> str:
    """Return the name of the chosen provider, or the explanation why there is none."""
    choice = choose_provider(parse_spec(**fields), apis)
    return choice if isinstance(choice, str) else choice.provider


@pytest.mark.parametrize(
    ("providers", "expected"),
    [
        pytest.param(tuple(P), "Kueue", id="all are installed"),
        pytest.param((P.POD_GROUP, P.VOLCANO, P.KAI), "Volcano", id="without Kueue"),
        pytest.param((P.POD_GROUP, P.COSCHEDULING, P.KAI), "KAI", id="without Kueue and Volcano"),
    ],
)
def test_job_with_a_queue_takes_the_first_provider_with_queues(
    providers: tuple[SchedulingProvider, ...], expected: str
) -> None:
    assert choose(serve(*providers), queueName="gpus") == expected


@pytest.mark.parametrize(
    ("providers", "scheduler", "expected"),
    [
        pytest.param(tuple(P), None, "PodGroup", id="all are installed"),
        pytest.param((P.KUEUE, P.COSCHEDULING, P.VOLCANO), "gangs", "Coscheduling", id="without PodGroup"),
        pytest.param((P.KUEUE, P.COSCHEDULING, P.VOLCANO), None, "Volcano", id="without the name of a scheduler"),
        pytest.param((P.KUEUE, P.VOLCANO, P.KAI), None, "Volcano", id="only Volcano works without a queue"),
    ],
)
def test_job_without_a_queue_takes_the_first_provider_without_queues(
    providers: tuple[SchedulingProvider, ...], scheduler: str | None, expected: str
) -> None:
    assert choose(serve(*providers), scheduler=scheduler) == expected


def test_cluster_without_providers_is_explained_by_each_candidate() -> None:
    nothing = "nothing in the cluster schedules the pods as a group: "

    assert choose(GroupApis()) == (
        f"{nothing}PodGroup is not installed; Coscheduling is not installed; Volcano is not installed"
    )
    assert choose(GroupApis(), queueName="gpus") == (
        f"{nothing}Kueue is not installed; Volcano is not installed; KAI is not installed"
    )


def test_provider_of_the_spec_is_never_replaced_by_another_one() -> None:
    others = serve(*(provider for provider in P if provider is not P.KAI))

    assert choose(serve(*P), provider="Volcano", queueName="gpus") == "Volcano"
    assert choose(others, provider="KAI", queueName="gpus").endswith(": KAI is not installed")


def test_provider_that_does_not_work_is_passed_over_and_explained() -> None:
    problems = {P.POD_GROUP: "is not enabled"}

    assert choose(serve(P.POD_GROUP, P.VOLCANO, problems=problems)) == "Volcano"
    explanation = choose(serve(P.POD_GROUP, P.COSCHEDULING, problems=problems))
    assert "PodGroup is not enabled; Coscheduling requires spec.podTemplate.schedulerName" in explanation


def test_coscheduling_requires_the_name_of_its_scheduler() -> None:
    forced = {"provider": "Coscheduling"}

    assert choose(serve(P.COSCHEDULING), **forced).endswith("Coscheduling requires spec.podTemplate.schedulerName")
    assert choose(serve(P.COSCHEDULING), scheduler="default-scheduler", **forced) == "Coscheduling"


def test_topology_is_left_to_providers_that_know_labels_of_nodes() -> None:
    without_kubernetes = serve(P.COSCHEDULING, P.VOLCANO)

    assert choose(serve(*P), topology=RACK) == "PodGroup"
    assert choose(without_kubernetes, topology=RACK, scheduler="gangs").endswith(
        "PodGroup is not installed; Coscheduling has no topology by label; Volcano has no topology by label"
    )
    assert choose(serve(P.VOLCANO, P.KAI), topology=RACK, queueName="gpus").endswith("KAI has no topology by label")


def test_preferred_topology_is_left_to_kueue() -> None:
    preferred = {**RACK, "mode": "Preferred"}

    assert choose(serve(*P), topology=preferred, queueName="gpus") == "Kueue"
    assert "PodGroup supports only the topology mode Required" in choose(serve(*P), topology=preferred)


@given(
    served=st.sets(st.sampled_from([version for versions in API_VERSIONS.values() for version in versions])),
    broken=st.sets(st.sampled_from(list(P))),
    provider=st.sampled_from([None, *P]),
    queue=st.sampled_from([None, "gpus"]),
    scheduler=st.sampled_from([None, "gangs"]),
    mode=st.sampled_from([None, "Required", "Preferred"]),
)
def test_chosen_provider_is_served_and_supports_what_the_spec_asks(
    served: set[str],
    broken: set[SchedulingProvider],
    provider: SchedulingProvider | None,
    queue: str | None,
    scheduler: str | None,
    mode: str | None,
) -> None:
    fields = {"provider": provider, "queueName": queue}
    topology = None if mode is None else {**RACK, "mode": mode}
    apis = GroupApis(find_group_apis(served).versions, dict.fromkeys(broken, "does not work"))
    try:
        spec = parse_spec(scheduler=scheduler, topology=topology, **{k: v for k, v in fields.items() if v is not None})
    except ValidationError:  # the API server rejects what no provider of this name supports
        assert provider is not None
        return

    choice = choose_provider(spec, apis)

    supported = [candidate for candidate in P if _supports(candidate, queue, scheduler, mode)]
    usable = {candidate for candidate in supported if candidate in apis.versions and candidate not in broken}
    if provider is not None:
        usable &= {provider}
    if isinstance(choice, str):
        assert not usable
    else:
        assert choice.provider in usable
        assert choice.api_version in served
        assert choice.queue_name == (queue or "")


def _supports(provider: SchedulingProvider, queue: str | None, scheduler: str | None, mode: str | None) -> bool:
    has_queues = provider in (WITH_QUEUE if queue else WITHOUT_QUEUE)
    has_topology = mode is None or provider in WITH_TOPOLOGY
    has_mode = mode != "Preferred" or provider is P.KUEUE
    return has_queues and has_topology and has_mode and (provider is not P.COSCHEDULING or scheduler is not None)


def test_providers_are_in_the_lists_that_agree_with_the_required_queue() -> None:
    assert {*WITH_QUEUE, *WITHOUT_QUEUE} == set(P)
    assert set(QUEUE_REQUIRED) == set(WITH_QUEUE) - set(WITHOUT_QUEUE)
