"""Tests of the validation of status.progress."""

from dataclasses import FrozenInstanceError
from datetime import UTC, datetime
from typing import Any

import pytest
from pydantic import ValidationError

from finetune_api.v1alpha1.status import JobStatus, Progress


def parse_progress(**fields: Any) -> Progress:
    progress = JobStatus.model_validate({"progress": fields}).progress
    assert progress is not None
    return progress


@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
def test_non_finite_numbers_are_dropped(number: float) -> None:
    assert parse_progress(step=1, loss=number, epoch=1.5) == Progress(step=1, epoch=1.5)


def test_json_number_beyond_the_float_range_is_dropped() -> None:
    status = JobStatus.model_validate_json('{"progress": {"step": 1, "gradNorm": 1e999}}')

    assert status.progress == Progress(step=1)


def test_times_without_timezone_are_rejected() -> None:
    assert parse_progress(updateTime="2026-01-01T00:00:00.500Z").update_time == datetime(
        2026, 1, 1, 0, 0, 0, 500_000, tzinfo=UTC
    )
    with pytest.raises(ValidationError, match="a time without timezone"):
        parse_progress(firstStepTime="2026-01-01T00:00:00")


def test_progress_is_serialized_in_camel_case_without_absent_values() -> None:
    reported_progress = {"step": 3, "totalSteps": 9, "memory": {"forecast": 9, "peakLowestRank": 1}}

    status = JobStatus.model_validate({"progress": {**reported_progress, "unknown": 1}})

    body = status.model_dump(mode="json", by_alias=True, exclude_none=True, exclude_defaults=True)
    assert body == {"progress": reported_progress}


def test_progress_is_immutable() -> None:
    with pytest.raises(FrozenInstanceError):
        parse_progress(step=1).step = 2  # type: ignore[misc]
