"""Reads the training progress from lines that training programs print (decisions/311).

The formats are progress bars of tqdm, the dicts of transformers' Trainer and ms-swift, and the lines of torchtune and
MiniMind. Lines are untrusted: all expressions take linear time, and no line raises an exception.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

from finetune_supervisor.messages import TrainingProgress

_OTHER_RANK = re.compile(r"\[(?:rank|default)(?!0\])\d+\]:")  # prefixes of torch and of torchrun --tee
_OWN_RANK = re.compile(r"\[(?:rank|default)0\]:")
# tqdm: `Train:  12%|#2        | 12/100 [00:10<01:20,  1.10it/s]`
_BAR = re.compile(r"%\|[^|]*\|\s*(\d{1,12})/(\d{1,12}) \[[\d:]{1,15}<([\d:?]{1,15})")
_TRAINING_BARS = ("", "train", "training")
_CURSOR_UP = "\x1b[A"  # tqdm prints it after a bar below another bar, such as that of an evaluation
# transformers and ms-swift: `{'loss': '1.23', 'learning_rate': '5e-05', 'epoch': '0.1'}`, without quotes before 5.0
_ITEM = re.compile(
    r"""['"](loss|eval_loss|grad_norm|learning_rate|epoch|global_step/max_steps|remaining_time)['"]:\s?"""
    r"""['"]?([^'",{}]{1,40})"""
)
# torchtune: `1|25|Loss: 1.54:   3%|3         | 25/808 [00:50<25:00,  1.90s/it]`, with the epoch and the step
_TORCHTUNE = re.compile(r"(\d{1,6})\|(\d{1,12})\|Loss: ([\d.e+-]{1,40})")
_TORCHTUNE_EPOCHS = re.compile(r"epochs: (\d{1,6})")  # line of the configuration that torchtune prints
# MiniMind: `Epoch:[1/2](100/1000), loss: 2.1, lr: 0.00005, epoch_time: 12.0min`, with the step within the epoch
_MINIMIND = re.compile(r"Epoch:\s?\[(\d{1,6})/(\d{1,6})\]\s?\((\d{1,12})/(\d{1,12})\)")
_MINIMIND_METRIC = re.compile(r"\b(loss|lr|learning_rate|epoch_time):\s?([\d.e+-]{1,40})", re.IGNORECASE)
_UNIT_SECONDS = {"d": 86_400, "h": 3600, "m": 60, "s": 1}
_MAX_REMAINING_SECONDS = 10**9


@dataclass(frozen=True)
class _EpochPosition:
    """Position of a program that counts its steps within an epoch."""

    epoch: int  # from 1
    epochs: int | None
    step: int
    steps: int  # per epoch

    def to_progress(self, remaining_seconds: float | None) -> dict[str, Any]:
        """Return whole steps, epochs and remaining time; `remaining_seconds` are those of the epoch."""
        step, total = max(self.epoch - 1, 0) * self.steps + self.step, self.epochs and self.epochs * self.steps
        seconds_left = None
        if total and remaining_seconds is not None and self.step < self.steps:
            seconds_left = remaining_seconds * (total - step) / (self.steps - self.step)
        return {
            "step": step,
            "total_steps": total,
            "epoch": step / self.steps if self.steps else None,
            "eta_seconds": _bound_seconds(0 if step == total else seconds_left),
        }


class ProgressLines:
    """The progress of a program according to the lines read so far; None before the first line with progress."""

    def __init__(self) -> None:
        self.progress: TrainingProgress | None = None
        self._last_total: int | None = None  # of the last bar without a description
        self._training_total: int | None = None  # of the bar that counts training steps, once it is certain
        self._epochs: int | None = None

    def read(self, line: str) -> None:
        """Update the progress with one line, or with one state of a progress bar."""
        if _OTHER_RANK.match(line):
            return
        for read in (self._read_bar, self._read_metrics, self._read_torchtune, self._read_minimind):
            values = read(line)
            if values:
                self.progress = replace(self.progress or TrainingProgress(from_log=True), **values)

    def _read_bar(self, line: str) -> dict[str, Any]:
        """Return step, total steps and remaining time if the line is a training bar.

        Bars of downloads and data have a description. A bar without one counts, unless a line with a loss has already
        followed a bar with another total.
        """
        match = _BAR.search(line)
        if match is None or line.rstrip().endswith(_CURSOR_UP):
            return {}
        description = _OWN_RANK.sub("", line[: match.start()].rstrip("0123456789"), count=1).strip(" :").lower()
        if description not in _TRAINING_BARS:
            return {}
        step, total = int(match[1]), int(match[2])
        if description:
            self._training_total = total
        self._last_total = total
        if self._training_total not in (None, total):
            return {}
        return {"step": step, "total_steps": total, "eta_seconds": _parse_clock(match[3])}

    def _read_metrics(self, line: str) -> dict[str, Any]:
        """Return the values of a dict that transformers or ms-swift prints; other dicts have no loss and no epoch."""
        texts = {match[1]: match[2] for match in _ITEM.finditer(line)}
        numbers = {name: parse_number(text) for name, text in texts.items()}
        values: dict[str, Any] = {
            name: number
            for name in ("loss", "eval_loss", "grad_norm", "learning_rate", "epoch")
            if (number := numbers.get(name)) is not None
        }
        if "epoch" not in values or not ("loss" in values or "eval_loss" in values):
            return {}
        if "loss" in values and self._last_total is not None:
            self._training_total = self._last_total
        steps = re.fullmatch(r"(\d{1,12})/(\d{1,12})", texts.get("global_step/max_steps", ""))
        if steps is not None:
            self._training_total = int(steps[2])
            values.update(step=int(steps[1]), total_steps=int(steps[2]))
            values["eta_seconds"] = _parse_units(texts.get("remaining_time", ""))
        return values

    def _read_torchtune(self, line: str) -> dict[str, Any]:
        if (epochs := _TORCHTUNE_EPOCHS.fullmatch(line)) is not None:
            self._epochs = int(epochs[1])
        match, bar = _TORCHTUNE.search(line), _BAR.search(line)
        if match is None or bar is None:
            return {}
        position = _EpochPosition(int(match[1]), self._epochs, step=int(bar[1]), steps=int(bar[2]))
        self._training_total = 0  # bars without a description belong to one epoch
        return {**position.to_progress(_parse_clock(bar[3])), "step": int(match[2]), "loss": parse_number(match[3])}

    def _read_minimind(self, line: str) -> dict[str, Any]:
        match = _MINIMIND.search(line)
        if match is None:
            return {}
        metrics: dict[str, float | None] = {}
        for metric in _MINIMIND_METRIC.finditer(line, match.end()):
            metrics.setdefault(metric[1].lower(), parse_number(metric[2]))
        minutes = metrics.get("epoch_time")
        position = _EpochPosition(int(match[1]), int(match[2]), step=int(match[3]), steps=int(match[4]))
        values = position.to_progress(None if minutes is None else 60 * minutes)
        rate = metrics.get("learning_rate", metrics.get("lr"))
        measured = {"loss": metrics.get("loss"), "learning_rate": rate}
        return {**values, **{name: number for name, number in measured.items() if number is not None}}


def parse_number(text: str) -> float | None:
    """Parse a number in the output of a program; return None if the text cannot be parsed."""
    try:
        return float(text)
    except ValueError:
        return None


def _parse_clock(text: str) -> int | None:
    """Return the seconds of a time such as 1:20:05; None for a time that tqdm does not know yet."""
    parts = text.split(":")
    if len(parts) > 3 or not all(part.isdigit() for part in parts):
        return None
    return _bound_seconds(sum(int(part) * 60**power for power, part in enumerate(reversed(parts))))


def _parse_units(text: str) -> int | None:
    """Return the seconds of a time such as 1h 20m 5s; None for another text."""
    parts = re.findall(r"(\d{1,9})([dhms])\b", text)
    return _bound_seconds(sum(int(number) * _UNIT_SECONDS[unit] for number, unit in parts)) if parts else None


def _bound_seconds(seconds: float | None) -> int | None:
    return int(seconds) if seconds is not None and 0 <= seconds < _MAX_REMAINING_SECONDS else None
