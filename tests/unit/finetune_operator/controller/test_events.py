"""Tests of the Kubernetes events of a job."""

from finetune_operator.controller.events import build_event
from finetune_operator.core.actions import EmitEvent
from testing.builders.jobs import NOW, UID, job
from testing.builders.passes import LATER


def test_events_with_equal_keys_have_equal_names() -> None:
    emit = EmitEvent("Warning", "RankKilled", "rank 3 was ended by SIGKILL", "failed-0")
    event = build_event(job().metadata, emit, NOW)
    repeated = build_event(job().metadata, EmitEvent("Warning", "RankKilled", "another message", "failed-0"), LATER)
    other = build_event(
        job().metadata, EmitEvent("Warning", "RankKilled", "rank 3 was ended by SIGKILL", "failed-1"), NOW
    )

    assert event["metadata"]["name"] == repeated["metadata"]["name"] != other["metadata"]["name"]
    assert (event["involvedObject"]["kind"], event["involvedObject"]["uid"]) == ("FineTuneJob", UID)
    assert (event["type"], event["reason"], event["firstTimestamp"]) == (
        "Warning",
        "RankKilled",
        "2026-01-01T12:00:00Z",
    )


def test_event_message_is_truncated_to_the_limit_of_the_api_server() -> None:
    event = build_event(job().metadata, EmitEvent("Normal", "Running", "x" * 5000, "running-0"), NOW)
    assert len(event["message"]) == 1024
