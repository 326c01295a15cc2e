"""What was seen of one run of a fault, and in what it is not what was expected. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from testing.faults.expectation import Expectation

Raw = dict[str, Any]


@dataclass(frozen=True)
class SeenFailure:
    """A failed attempt as `status.attempts` tells it."""

    reason: str
    fault: str
    action: str
    node_rank: int | None = None
    rank: int | None = None

    def __str__(self) -> str:
        return f"{self.reason} ({self.fault or 'no fault'}), {self.action or 'no action'}"


@dataclass(frozen=True)
class Run:
    """One fault, once. Seconds count from the moment the fault began to be made."""

    fault: str
    began: str  # UTC, ISO 8601
    at_once: int = 1  # so many jobs at most were struck at that time
    phase: str = ""
    failures: tuple[SeenFailure, ...] = ()
    waited_for: tuple[str, ...] = ()
    restarts: int = 0
    counted: int = 0
    detected_seconds: float | None = None
    again_seconds: float | None = None
    avoided: tuple[str, ...] = ()  # machines that the last attempt kept away from
    steps_lost: int = 0  # trained twice
    steps_missing: int = 0  # never trained, although a later one was
    leftovers: tuple[str, ...] = ()
    trouble: str = ""  # what the harness waited for in vain
    message: str = ""  # the job's own last words, for whoever looks into it

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, line: str) -> Run:
        raw: Raw = json.loads(line)
        raw["failures"] = tuple(SeenFailure(**failure) for failure in raw["failures"])
        fields: Raw = {name: tuple(value) if isinstance(value, list) else value for name, value in raw.items()}
        return cls(**fields)


def read_status(status: Raw) -> Raw:
    """Fields of a Run that the job's status tells at its end."""
    failures = tuple(
        SeenFailure(
            reason=attempt.get("reason", ""),
            fault=attempt.get("fault", ""),
            action=attempt.get("action", ""),
            node_rank=attempt.get("nodeRank"),
            rank=attempt.get("rank"),
        )
        for attempt in status.get("attempts", ())
        if attempt["state"] == "Failed"
    )
    last: Raw = next(reversed(status.get("attempts", ())), {})
    finished: Raw = next((c for c in status.get("conditions", ()) if c["type"] == "Finished"), {})
    return {
        "phase": status.get("phase", ""),
        "failures": failures,
        "restarts": status.get("restarts", 0),
        "counted": (status.get("withoutProgress") or {}).get("counted", 0),
        "avoided": tuple(last.get("avoids", ())),
        "message": finished.get("message", ""),
    }


def deviations(expected: Expectation, run: Run) -> tuple[str, ...]:
    """Everything in which the run is not as expected; empty if all is well."""
    return (*_wrong_verdicts(expected, run), *_wrong_blame(expected, run), *_lost(expected, run))


def _wrong_verdicts(expected: Expectation, run: Run) -> Iterator[str]:
    if run.trouble:
        yield run.trouble
    if run.phase != expected.phase:
        yield f"ended {run.phase or 'nowhere'}, expected {expected.phase}"
    wanted = tuple((failure.reason, failure.fault, failure.action) for failure in expected.failures)
    if tuple((failure.reason, failure.fault, failure.action) for failure in run.failures) != wanted:
        yield f"saw {describe_failures(run.failures)}"
    if run.restarts != expected.restarts:
        yield f"{run.restarts} restarts, expected {expected.restarts}"
    if run.counted != expected.counted:
        yield f"{run.counted} restarts counted against the budget, expected {expected.counted}"
    if expected.waits_for is not None and expected.waits_for not in run.waited_for:
        yield f"said to wait for {', '.join(run.waited_for) or 'nothing'}, expected {expected.waits_for}"


def _wrong_blame(expected: Expectation, run: Run) -> Iterator[str]:
    if bool(run.avoided) != expected.avoids:
        yield f"kept away from {', '.join(run.avoided) or 'no machine'}"
    if run.failures and expected.failures:
        blamed = run.failures[0]
        for name, wanted_number in (("node_rank", expected.node_rank), ("rank", expected.rank)):
            if wanted_number is not None and getattr(blamed, name) != wanted_number:
                yield f"blamed {name} {getattr(blamed, name)}, expected {wanted_number}"


def _lost(expected: Expectation, run: Run) -> Iterator[str]:
    if expected.steps_lost is not None and run.steps_lost > expected.steps_lost:
        yield f"{run.steps_lost} steps lost, expected at most {expected.steps_lost}"
    if run.steps_missing:
        yield f"{run.steps_missing} steps were never trained"
    if run.leftovers:
        yield f"left behind: {', '.join(run.leftovers)}"


def describe_failures(failures: tuple[SeenFailure, ...]) -> str:
    """In one line; most faults have one."""
    return ", then ".join(map(str, failures)) or "no failure"
