"""Tests of the labels and annotations for Kueue."""

from typing import Any

from testing.builders.jobs import UID
from testing.builders.manifests import build_pod_manifests, build_run_plan

KUEUE = "kueue.x-k8s.io/"


def select_queue_keys(values: dict[str, str]) -> dict[str, str]:
    return {key.removeprefix(KUEUE): value for key, value in values.items() if key.startswith(KUEUE)}


def test_every_pod_of_every_attempt_belongs_to_the_same_group() -> None:
    scheduling = {"queueName": "gpus", "priorityClassName": "high"}
    pods = [
        pod for attempt in (0, 3) for pod in build_pod_manifests(build_run_plan(attempt=attempt, scheduling=scheduling))
    ]

    for pod in pods:
        assert select_queue_keys(pod["metadata"]["labels"]) == {
            "queue-name": "gpus",
            "pod-group-name": f"bert-{UID[:8]}",
            "priority-class": "high",
        }
        assert select_queue_keys(pod["metadata"]["annotations"]) == {"pod-group-total-count": "2"}


def test_pods_of_a_group_differ_only_in_name_and_variables() -> None:
    """Kueue replaces a pod of a group only by one with equal requests, affinity and constraints."""

    def reduce(pod: dict[str, Any]) -> dict[str, Any]:
        (container,) = pod["spec"]["containers"]
        kept = {key: value for key, value in pod["spec"].items() if key not in ("hostname", "volumes")}
        return {**kept, "containers": [{**container, "env": []}]}

    first, *others = (
        reduce(pod)
        for attempt in (0, 1)
        for pod in build_pod_manifests(build_run_plan(attempt=attempt, scheduling={"queueName": "gpus"}))
    )

    assert all(other == first for other in others)
