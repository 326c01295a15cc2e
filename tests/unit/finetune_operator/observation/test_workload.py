"""Tests of parsing Workloads and of the plain words for Kueue's messages.

The messages are those of Kueue 0.19.2, from its source or from runs; names and numbers are replaced.
"""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from finetune_operator.observation.workload import WorkloadObservation, explain_message, observe_workload

PREFIX = "couldn't assign flavors to pod set b6619b06: "
QUOTA = "insufficient unused quota for nvidia.com/gpu in flavor a100, 8 more needed"


def build_workload(*conditions: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {
        "metadata": {"name": "bert-11111111"},
        "spec": fields.pop("spec", {}),
        "status": {"conditions": conditions, **fields},
    }


@pytest.mark.parametrize(
    ("message", "explanation"),
    [
        pytest.param(PREFIX + QUOTA, "8 more nvidia.com/gpu must become free in flavor a100", id="quota in use"),
        pytest.param(
            f"{PREFIX}{QUOTA}, insufficient unused quota for memory in flavor h100, 1Gi more needed",
            "1Gi more memory must become free in flavor h100",
            id="two flavors",
        ),
        pytest.param(
            PREFIX + "insufficient quota for cpu in flavor rf, previously considered podsets requests (0)"
            " + current podset request (3) > maximum capacity (1)",
            "it needs 3 cpu in flavor rf, of which the queue never has more than 1",
            id="quota too small",
        ),
        pytest.param(
            f"{PREFIX}{QUOTA}. Pending the preemption of 2 workload(s)",
            "it waits until preempted jobs have stopped (2)",
            id="preemption",
        ),
        pytest.param(
            PREFIX + 'topology "racks" allows to fit only 2 out of 4 pod(s)',
            "the largest domain of topology racks has room for 2 of 4 pods",
            id="topology in part",
        ),
        pytest.param(
            PREFIX + 'topology "racks" doesn\'t allow to fit any of 4 pod(s). Total nodes: 2; excluded: 2 x cpu',
            "no domain of topology racks has room for the pods",
            id="topology",
        ),
        pytest.param(
            "waiting for all admitted workloads to be in PodsReady condition",
            "Kueue starts it once the pods of all admitted jobs are ready (waitForPodsReady)",
            id="pods of others",
        ),
        pytest.param("LocalQueue gpus doesn't exist", "LocalQueue gpus doesn't exist", id="missing queue"),
        pytest.param("ClusterQueue gpus is stopped", "ClusterQueue gpus is stopped", id="stopped queue"),
        pytest.param("", "", id="empty"),
    ],
)
def test_messages_are_explained_in_plain_words(message: str, explanation: str) -> None:
    assert explain_message(message) == explanation


def test_a_timeout_of_the_pods_is_explained_with_the_time_of_the_next_attempt() -> None:
    evicted = {"type": "Evicted", "status": "True", "reason": "PodsReadyTimeout", "message": "Exceeded the PodsReady"}
    quota = {"type": "QuotaReserved", "status": "False", "message": PREFIX + QUOTA}
    requeue = {"count": 1, "requeueAt": "2026-01-01T12:00:00Z"}

    workload = observe_workload(build_workload(evicted, quota, requeueState=requeue), {})

    assert workload == WorkloadObservation(
        "its pods were not ready in time, so that Kueue queued it again;"
        " 8 more nvidia.com/gpu must become free in flavor a100",
        requeue_at="2026-01-01T12:00:00Z",
    )


def test_a_preempted_workload_is_explained_by_what_it_waits_for() -> None:
    evicted = {"type": "Evicted", "status": "True", "reason": "Preempted", "message": "Preempted to accommodate x"}
    quota = {"type": "QuotaReserved", "status": "False", "message": PREFIX + QUOTA}

    assert observe_workload(build_workload(evicted, quota), {}).message.startswith("8 more nvidia.com/gpu")


def test_a_deactivated_workload_is_not_active() -> None:
    assert not observe_workload(build_workload(spec={"active": False}), {}).is_active
    assert observe_workload(build_workload(), {}).is_active


def test_position_is_that_of_the_workload() -> None:
    assert observe_workload(build_workload(), {"bert-11111111": 1, "other": 0}).position == 1
    assert observe_workload(build_workload(), {"other": 0}).position is None


@given(st.text(max_size=300))
def test_any_message_can_be_explained(message: str) -> None:
    assert isinstance(explain_message(message), str)
    assert isinstance(explain_message(f"{QUOTA} {message} topology"), str)
