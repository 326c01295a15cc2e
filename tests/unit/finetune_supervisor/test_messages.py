"""Tests of the JSON format of node messages."""

import math
from datetime import UTC, datetime

from finetune_supervisor.messages import PeakMemory, TerminationMessage, TrainingProgress, to_json_object


def test_fields_are_sent_in_camel_case_at_every_level() -> None:
    progress = TrainingProgress(step=4, eta_seconds=1, memory=PeakMemory(forecast=9, peak_highest=8))

    sent = to_json_object(TerminationMessage(node_rank=1, error_type="X", progress=progress))

    assert sent == {
        "nodeRank": 1,
        "attempt": 0,
        "version": 1,
        "final": False,
        "outcome": "starting",
        "errorType": "X",
        "victim": False,
        "progress": {
            "step": 4,
            "etaSeconds": 1,
            "memory": {"forecast": 9, "peakHighest": 8, "peakHighestRank": 0, "peakLowest": 0, "peakLowestRank": 0},
        },
    }


def test_times_are_sent_in_utc_with_milliseconds() -> None:
    sent = to_json_object(TrainingProgress(update_time=datetime(2026, 11, 21, 10, 27, 28, 3999, tzinfo=UTC)))

    assert sent["updateTime"] == "2026-11-21T10:27:28.003Z"


def test_nan_and_infinity_are_omitted() -> None:
    assert to_json_object(TrainingProgress(loss=math.nan, grad_norm=math.inf)) == {"step": 0}
