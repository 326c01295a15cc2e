"""Tests of the Kubernetes events of a job."""

import pytest

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
    assert (event["regarding"]["kind"], event["regarding"]["uid"]) == ("FineTuneJob", UID)


def test_event_has_the_fields_that_the_events_api_requires() -> None:
    event = build_event(job().metadata, EmitEvent("Warning", "RankKilled", "rank 3 was killed", "restart-1"), NOW)

    assert event["apiVersion"] == "events.k8s.io/v1"
    assert event["eventTime"] == "2026-01-01T12:00:00.000000Z"
    assert (event["type"], event["reason"], event["action"]) == ("Warning", "RankKilled", "Restart")
    assert event["note"] == "rank 3 was killed"
    assert event["reportingController"] == "finetune.dev/finetune-operator"
    assert 0 < len(event["reportingInstance"]) <= 128


@pytest.mark.parametrize("character", ["x", "語"])
def test_event_note_is_truncated_to_the_byte_limit_of_the_api_server(character: str) -> None:
    event = build_event(job().metadata, EmitEvent("Normal", "Running", character * 5000, "running-0"), NOW)

    assert 1022 <= len(event["note"].encode()) <= 1024
    assert set(event["note"]) == {character}


def test_event_note_contains_control_characters_as_escapes() -> None:
    event = build_event(job().metadata, EmitEvent("Normal", "Running", "a\x1b[2Jb\u202e\n", "running-0"), NOW)

    assert event["note"] == "a\\x1b[2Jb\\u202e\n"
