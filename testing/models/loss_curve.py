"""Read a job's losses from its output folder and render them as a text chart."""

from __future__ import annotations

import json
from pathlib import Path

WIDTH, HEIGHT = 60, 8


def read_losses(output: Path) -> dict[int, float]:
    """Return the losses in the result's trainer state, by step."""
    state = json.loads((output / "result" / "trainer_state.json").read_text())
    return {entry["step"]: entry["loss"] for entry in state["log_history"] if "loss" in entry}


def render_loss_curve(losses: dict[int, float]) -> str:
    """Render a text chart of the losses, with the step on the horizontal axis."""
    steps = sorted(losses)
    columns = (
        [losses[steps[index * len(steps) // WIDTH]] for index in range(WIDTH)]
        if len(steps) > WIDTH
        else [losses[step] for step in steps]
    )
    low, high = min(columns), max(columns)
    span = (high - low) or 1.0
    levels = [round((value - low) / span * (HEIGHT - 1)) for value in columns]
    lines = []
    for row in range(HEIGHT - 1, -1, -1):
        label = low + span * row / (HEIGHT - 1)
        lines.append(f"{label:8.3f} │" + "".join("•" if level == row else " " for level in levels))
    lines.append(" " * 9 + "└" + "─" * len(columns))
    lines.append(" " * 10 + f"step {steps[0]}" + f"step {steps[-1]}".rjust(len(columns) - len(f"step {steps[0]}")))
    return "\n".join(lines)
