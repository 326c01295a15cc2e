"""Real texts of failures, each with what it tells of; a third was set aside before the patterns were written.

They are facts: what programs printed, as quoted in the threads and pages named in `source`, or when a failure was
provoked as it says; cut to 400 characters, with names of people and hosts replaced. In what was provoked, a server of
our own stood for the Hub.
"""

import json
from dataclasses import dataclass
from pathlib import Path

from finetune_api.v1alpha1.reasons import Reason

_FOLDER = Path(__file__).parent
_SAME = {"NameResolution": Reason.RENDEZVOUS_TIMEOUT, "Segfault": Reason.RANK_CRASHED}


@dataclass(frozen=True)
class Labelled:
    """One text, and the reason that a person gave it."""

    reason: Reason
    error_type: str
    text: str
    source: str

    @property
    def said(self) -> str:
        return f"{self.error_type}: {self.text}"


@dataclass(frozen=True)
class Start:
    """What a kubelet said of a container that never ran.

    `kind`: the reason that Kubernetes gave it; `label`: the Reason that a person gave, or `RegistryInTrouble`, whose
    images are waited for without limit.
    """

    kind: str
    label: str
    text: str
    source: str


def read_starts(*, held_out: bool) -> list[Start]:
    path = _FOLDER / ("starts.held_out.jsonl" if held_out else "starts.jsonl")
    return [Start(**json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]


def read_corpus(*, held_out: bool) -> list[Labelled]:
    path = _FOLDER / ("failures.held_out.jsonl" if held_out else "failures.jsonl")
    raw = (json.loads(line) for line in path.read_text(encoding="utf-8").splitlines())
    return [
        Labelled(
            _SAME[each["label"]] if each["label"] in _SAME else Reason(each["label"]),
            each["error_type"],
            each["text"],
            each["source"],
        )
        for each in raw
    ]
