"""Tests of the validation of status.progress."""

from dataclasses import FrozenInstanceError
from datetime import UTC, datetime
from typing import Any

import pytest

from finetune_api.v1alpha1.status import JobStatus, Progress


def parse_progress(**fields: Any) -> Progress:
    progress = JobStatus.model_validate({"progress": fields}).progress
    assert progress is not None
    return progress


@pytest.mark.parametrize("time", ["2026-01-01T00:00:00", "1969-12-31T23:59:59Z", "2100-01-01T00:00:00Z"])
def test_times_without_a_timezone_or_out_of_range_are_dropped(time: str) -> None:
    assert parse_progress(step=1, firstStepTime=time) == Progress(step=1)


def test_times_are_parsed_with_fractions_of_seconds() -> None:
    assert parse_progress(updateTime="2026-01-01T00:00:00.500Z").update_time == datetime(
        2026, 1, 1, 0, 0, 0, 500_000, tzinfo=UTC
    )


def test_progress_is_serialized_in_camel_case_without_absent_values() -> None:
    reported_progress = {"step": 3, "totalSteps": 9, "memory": {"forecast": 9, "peakLowestRank": 1}}

    status = JobStatus.model_validate({"progress": {**reported_progress, "unknown": 1}})

    body = status.model_dump(mode="json", by_alias=True, exclude_none=True, exclude_defaults=True)
    assert body == {"progress": reported_progress}


def test_progress_is_immutable() -> None:
    with pytest.raises(FrozenInstanceError):
        parse_progress(step=1).step = 2  # type: ignore[misc]
