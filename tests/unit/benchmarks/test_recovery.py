"""Tests of the statistics that `make bench-recovery` prints."""

from benchmarks.recovery.stages import (
    RECOVERED,
    StageTimes,
    append_stage_seconds,
    compute_stage_seconds,
    summarise_figures,
)


def test_stages_are_listed_in_chronological_order() -> None:
    logged_at = {"imported": 1004.0, "joined": 1004.5, "step 1": 1006.25}

    stages = compute_stage_seconds(
        RECOVERED, 1000.0, StageTimes(created_at=1001.5, running_at=1002.0, logged_at=logged_at, stopped_at=1001.0)
    )

    assert list(stages.values()) == [6.25, 1.0, 1.5, 2.0, 4.0, 4.5]
    assert next(iter(stages)) == RECOVERED
    assert "  until the operator stopped the attempt" not in compute_stage_seconds(
        RECOVERED, 1000.0, StageTimes(1001.5, 1002.0, logged_at)
    )


def test_peer_measurements_are_summarised_by_median_and_range() -> None:
    figures: tuple[dict[str, list[float]], dict[str, list[float]]] = ({}, {})
    for seconds in (11.0, 14.5, 9.9):
        append_stage_seconds(figures, ({}, {RECOVERED: seconds}))

    assert summarise_figures(figures[1]) == {RECOVERED: "11.000 (9.900 to 14.500)"}
