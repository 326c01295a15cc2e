"""A case of the GPU check, and its result. Uses the standard library only."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

EXIT_PASSED, EXIT_FAILED, EXIT_SKIPPED = 0, 1, 3  # exit codes of the process of a case
CUDA = "cuda"  # a requirement; all other requirements are names of Python modules


@dataclass(frozen=True)
class GpuCheckCase:
    """One check, which runs in its own process."""

    name: str
    proves: str
    function: str  # `module:function`, called with a CheckContext and the arguments
    limit_seconds: int
    arguments: tuple[str, ...] = ()
    requires: tuple[str, ...] = ()


class GpuCheckOutcome(StrEnum):
    """Outcome of a case; a case that exceeds its time limit has failed."""

    PASSED = "passed"
    FAILED = "failed"
    SKIPPED = "skipped"


@dataclass(frozen=True)
class GpuCheckResult:
    """Result of a case: outcome, reason if it did not pass, and everything that it recorded."""

    case: str
    outcome: GpuCheckOutcome
    seconds: float = 0.0
    reason: str = ""
    facts: dict[str, Any] = field(default_factory=dict)
