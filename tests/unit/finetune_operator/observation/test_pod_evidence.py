"""What a pod leaves behind, read from its body: the supervisor's words before those of Kubernetes."""

import json
from datetime import UTC, datetime

import pytest

from finetune_api.termination import Outcome
from finetune_api.v1alpha1.status import Evidence
from finetune_operator.observation.pods import MESSAGE_CHARACTERS, NodeObservation, observe_pod
from testing.builders.jobs import Raw, ended, job, pod

OF = job()
SAID = {
    "final": True,
    "outcome": "failed",
    "errorType": "KeyError",
    "message": "no rows",
    "rank": 3,
    "time": 1e9 + 0.25,
}


def look(body: Raw) -> NodeObservation:
    node = observe_pod(body, gone=False)
    assert node is not None
    return node


def evidence(body: Raw) -> Evidence:
    return look(body).evidence


def condition(kind: str, status: str, **fields: str) -> Raw:
    return {"type": kind, "status": status, **fields}


def test_what_the_supervisor_said_is_the_evidence() -> None:
    found = evidence(ended(OF, 0, message=json.dumps({**SAID, "progress": {"step": 7}})))
    assert (found.outcome, found.error_type, found.message, found.rank) == ("failed", "KeyError", "no rows", 3)
    assert (found.exit_code, found.last_step) == (1, 7)


def test_the_supervisors_clock_is_finer_than_that_of_kubernetes() -> None:
    stamp = "2001-09-09T01:46:41Z"
    last_words, noted = SAID, {**SAID, "final": False}
    assert evidence(ended(OF, 0, message=json.dumps(last_words), finishedAt=stamp)).finished_at == datetime(
        2001, 9, 9, 1, 46, 40, 250_000, UTC
    )
    # what was noted while it ran tells nothing of the end
    assert evidence(ended(OF, 0, message=json.dumps(noted), finishedAt=stamp)).finished_at == datetime(
        2001, 9, 9, 1, 46, 41, tzinfo=UTC
    )


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("Traceback: no such file", id="a log"),
        pytest.param('{"loss": 1.5', id="a log that begins like JSON"),
        pytest.param('{"outcome": "exploded"}', id="JSON that is not ours"),
    ],
)
def test_a_message_that_is_not_ours_is_the_end_of_a_log(text: str) -> None:
    node = look(ended(OF, 0, message=f"  {text}\n"))
    assert node.termination is None
    assert (node.evidence.outcome, node.evidence.message) == ("", text)


def test_of_a_log_the_end_is_kept_and_of_last_words_the_beginning() -> None:
    long = "begin " + "x" * MESSAGE_CHARACTERS + " end"
    log, words = ended(OF, 0, message=long), ended(OF, 0, message=json.dumps({**SAID, "message": long}))
    assert evidence(log).message == long[-MESSAGE_CHARACTERS:]
    assert evidence(words).message == long[:MESSAGE_CHARACTERS]


def test_an_eviction_explains_more_than_the_containers_error() -> None:
    body = ended(OF, 0, exit_code=137, message="killed")
    evicted = {**body, "status": {**body["status"], "reason": "Evicted", "message": "node was low on memory"}}
    assert (evidence(evicted).reason, evidence(evicted).message) == ("Evicted", "node was low on memory")
    assert (evidence(body).reason, evidence(body).message) == ("Error", "killed")


def test_only_a_disruption_that_holds_is_one() -> None:
    target = condition("DisruptionTarget", "True", reason="PreemptionByScheduler", message="made room")
    was = condition("DisruptionTarget", "False", reason="PreemptionByScheduler")
    disrupted = evidence(pod(OF, 0, conditions=[condition("Ready", "False"), target]))
    assert (disrupted.disruption, disrupted.message) == ("PreemptionByScheduler", "made room")
    assert evidence(pod(OF, 0, conditions=[was])).disruption == ""


def test_the_signal_of_a_mute_container_is_kept() -> None:
    found = evidence(ended(OF, 0, exit_code=137, signal=9))
    assert (found.signal, found.exit_code) == (9, 137)


@pytest.mark.parametrize(
    ("exit_code", "outcome", "succeeded"),
    [
        pytest.param(0, Outcome.SUCCEEDED, True, id="published"),
        pytest.param(0, Outcome.STOPPED, False, id="stopped well"),
        pytest.param(0, Outcome.RUNNING, False, id="ended in the middle"),
        pytest.param(1, Outcome.SUCCEEDED, False, id="ended badly after all"),
    ],
)
def test_exit_0_alone_proves_nothing(exit_code: int, outcome: Outcome, succeeded: bool) -> None:
    message = json.dumps({"final": True, "outcome": outcome})
    assert look(ended(OF, 0, exit_code=exit_code, message=message)).succeeded is succeeded
