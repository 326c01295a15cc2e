"""Result of one run of a fault and its deviations from the expectation, computed without I/O."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from testing.faults.expectation import Expectation

RawBody = dict[str, Any]


@dataclass(frozen=True)
class ObservedFailure:
    """A failed attempt, parsed from `status.attempts`."""

    reason: str
    fault: str
    action: str
    node_rank: int | None = None
    rank: int | None = None

    def __str__(self) -> str:
        return f"{self.reason} ({self.fault or 'no fault'}), {self.action or 'no action'}"


@dataclass(frozen=True)
class FaultRun:
    """Result of one run of a fault; times are in seconds since the injection began."""

    fault: str
    began: str  # start time in UTC, ISO 8601
    at_once: int = 1  # maximum number of faults that ran at the same time
    phase: str = ""
    failures: tuple[ObservedFailure, ...] = ()
    waited_for: tuple[str, ...] = ()
    restarts: int = 0
    counted: int = 0
    detected_seconds: float | None = None
    again_seconds: float | None = None
    avoided: tuple[str, ...] = ()  # Kubernetes nodes that the last attempt avoided
    steps_lost: int = 0  # number of steps that were trained twice
    steps_missing: int = 0  # number of steps that were skipped
    leftovers: tuple[str, ...] = ()
    trouble: str = ""  # error of the test harness, such as a timeout
    message: str = ""  # message of the job's Finished condition
    values: dict[str, str | float] = field(default_factory=dict)  # measured by the injection

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, line: str) -> FaultRun:
        document: RawBody = json.loads(line)
        document["failures"] = tuple(ObservedFailure(**failure) for failure in document["failures"])
        fields: RawBody = {name: tuple(value) if isinstance(value, list) else value for name, value in document.items()}
        return cls(**fields)


def parse_status(status: RawBody) -> RawBody:
    """Return the FaultRun fields that are derived from the final status of the job."""
    failures = tuple(
        ObservedFailure(
            reason=attempt.get("reason", ""),
            fault=attempt.get("fault", ""),
            action=attempt.get("action", ""),
            node_rank=attempt.get("nodeRank"),
            rank=attempt.get("rank"),
        )
        for attempt in status.get("attempts", ())
        if attempt["state"] == "Failed"
    )
    last_attempt: RawBody = next(reversed(status.get("attempts", ())), {})
    finished_condition: RawBody = next((c for c in status.get("conditions", ()) if c["type"] == "Finished"), {})
    return {
        "phase": status.get("phase", ""),
        "failures": failures,
        "restarts": status.get("restarts", 0),
        "counted": (status.get("withoutProgress") or {}).get("counted", 0),
        "avoided": tuple(last_attempt.get("avoids", ())),
        "message": finished_condition.get("message", ""),
    }


def find_deviations(expectation: Expectation, run: FaultRun) -> tuple[str, ...]:
    """Return all deviations of the run from the expectation."""
    return (
        *_check_verdicts(expectation, run),
        *_check_root_cause(expectation, run),
        *_check_lost_steps(expectation, run),
        *_check_values(expectation, run),
    )


def _check_verdicts(expectation: Expectation, run: FaultRun) -> Iterator[str]:
    if run.trouble:
        yield run.trouble
    if run.phase != expectation.phase:
        yield f"ended {run.phase or 'in no phase'}, expected {expectation.phase}"
    expected_failures = tuple((failure.reason, failure.fault, failure.action) for failure in expectation.failures)
    if tuple((failure.reason, failure.fault, failure.action) for failure in run.failures) != expected_failures:
        yield f"observed {describe_failures(run.failures)}"
    if run.restarts != expectation.restarts:
        yield f"{run.restarts} restarts, expected {expectation.restarts}"
    if run.counted != expectation.counted_restarts:
        yield f"{run.counted} restarts counted against the budget, expected {expectation.counted_restarts}"
    if expectation.pending_reason is not None and expectation.pending_reason not in run.waited_for:
        yield f"reported to wait for {', '.join(run.waited_for) or 'nothing'}, expected {expectation.pending_reason}"


def _check_root_cause(expectation: Expectation, run: FaultRun) -> Iterator[str]:
    if bool(run.avoided) != expectation.avoids_node:
        yield f"avoided {', '.join(run.avoided) or 'no Kubernetes node'}"
    if run.failures and expectation.failures:
        first_failure = run.failures[0]
        for name, expected_number in (("node_rank", expectation.node_rank), ("rank", expectation.rank)):
            if expected_number is not None and getattr(first_failure, name) != expected_number:
                yield f"blamed {name} {getattr(first_failure, name)}, expected {expected_number}"


def _check_lost_steps(expectation: Expectation, run: FaultRun) -> Iterator[str]:
    if expectation.max_steps_lost is not None and run.steps_lost > expectation.max_steps_lost:
        yield f"{run.steps_lost} steps lost, expected at most {expectation.max_steps_lost}"
    if run.steps_missing:
        yield f"{run.steps_missing} steps were never trained"
    if run.leftovers:
        yield f"left behind: {', '.join(run.leftovers)}"


def _check_values(expectation: Expectation, run: FaultRun) -> Iterator[str]:
    for expected in expectation.values:
        if expected.name not in run.values:
            yield f"{expected.name}: not measured"
        elif not expected.is_met_by(run.values[expected.name]):
            yield f"{expected}, measured {run.values[expected.name]}"


def describe_failures(failures: tuple[ObservedFailure, ...]) -> str:
    """Format the failures as one line."""
    return ", then ".join(map(str, failures)) or "no failure"
