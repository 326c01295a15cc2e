"""Corpus of labelled error messages; one third was held out before the error patterns were written.

Every message is the output of a program, truncated to 400 characters. Paths, names and addresses of people are
replaced by placeholders: `/path/to`, `user`, `host-0`, `10.0.0.1`, `acme`. `source` is the thread or page that quotes
the message. If it starts with "provoked", the failure was caused deliberately for the corpus with the named version of
a library, with a local server instead of the Hub.
"""

import json
from dataclasses import dataclass
from pathlib import Path

from finetune_api.v1alpha1.reasons import Reason

_FOLDER = Path(__file__).parent
FAILURE_FILES = (_FOLDER / "failures.jsonl", _FOLDER / "failures.held_out.jsonl")
_ALIASES = {"NameResolution": Reason.RENDEZVOUS_TIMEOUT, "Segfault": Reason.RANK_CRASHED}


@dataclass(frozen=True)
class LabelledError:
    """An error message with its manually assigned reason."""

    reason: Reason
    error_type: str
    text: str
    source: str

    @property
    def message(self) -> str:
        return f"{self.error_type}: {self.text}"


@dataclass(frozen=True)
class LabelledStartFailure:
    """A kubelet message about a container that never started.

    `kind` is the waiting reason of Kubernetes. `label` is the manually assigned Reason, or `RegistryInTrouble` if the
    operator retries without a timeout.
    """

    kind: str
    label: str
    text: str
    source: str


def read_start_failures(*, held_out: bool) -> list[LabelledStartFailure]:
    path = _FOLDER / ("starts.held_out.jsonl" if held_out else "starts.jsonl")
    return [LabelledStartFailure(**json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]


def read_corpus(*, held_out: bool) -> list[LabelledError]:
    entries = (json.loads(line) for line in FAILURE_FILES[held_out].read_text(encoding="utf-8").splitlines())
    return [
        LabelledError(
            _ALIASES[entry["label"]] if entry["label"] in _ALIASES else Reason(entry["label"]),
            entry["error_type"],
            entry["text"],
            entry["source"],
        )
        for entry in entries
    ]
