"""What a case receives: folders, device and size, and a file for its facts."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from benchmarks.trainer.cases import DeviceSettings


class CheckFailed(Exception):
    """Raised by a case whose check failed; the message contains the expected and the actual value."""


class CheckSkipped(Exception):
    """Raised by a case that cannot run; the message contains the reason."""


@dataclass(frozen=True)
class CheckContext:
    """Folders, device and size of a case. `scratch` is shared by all cases of a run."""

    scratch: Path
    logs: Path
    facts_file: Path
    small: bool  # tiny models
    on_gpu: bool

    @property
    def models(self) -> Path:
        """Folder of the models with random weights, each of which is written by the first case that uses it."""
        return self.scratch / "models"

    @property
    def settings(self) -> DeviceSettings:
        from benchmarks.trainer.cases import DeviceSettings

        return DeviceSettings(
            "bfloat16" if self.on_gpu else "float32", "cuda" if self.on_gpu else "cpu", forecasts_memory=True
        )

    def record(self, **facts: Any) -> None:
        """Append facts to the result of the case; they are kept if the case is killed later."""
        with self.facts_file.open("a", encoding="utf-8") as lines:
            lines.write(json.dumps(facts) + "\n")

    def store_losses(self, name: str, losses: list[float]) -> None:
        """Store the losses of a run as reference for later cases."""
        (self.scratch / f"{name}.losses.json").write_text(json.dumps(losses))

    def load_losses(self, name: str) -> list[float]:
        """Return stored losses. Raises: CheckSkipped if the case that stores them did not pass."""
        path = self.scratch / f"{name}.losses.json"
        if not path.exists():
            raise CheckSkipped(f"there are no losses of {name!r} to compare with, because its case did not pass")
        losses: list[float] = json.loads(path.read_text())
        return losses


def require(condition: object, message: str) -> None:
    """Raise CheckFailed with the message if the condition is false."""
    if not condition:
        raise CheckFailed(message)


def require_equal_losses(losses: list[float], reference: list[float], *, tolerance: float) -> float:
    """Return the largest relative difference. Raises: CheckFailed if it exceeds the tolerance."""
    require(losses and len(losses) == len(reference), f"{len(losses)} losses, {len(reference)} in the reference")
    difference = max(abs(loss - expected) / abs(expected) for loss, expected in zip(losses, reference, strict=True))
    require(difference <= tolerance, f"losses {losses} differ from {reference} by {difference:.2e} > {tolerance:g}")
    return difference
