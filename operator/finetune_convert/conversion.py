"""Defines the result of a conversion: the job, and one entry for each option and variable of the input."""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

Tree = dict[str, Any]  # parsed YAML, or a part of a job that is not validated yet

MAX_INPUT_BYTES = 1_000_000


class InputKind(StrEnum):
    """Kinds of input; a shell text without one of these tools has no kind."""

    SWIFT = "swift"
    LLAMAFACTORY = "llamafactory"
    AXOLOTL = "axolotl"
    TORCHRUN = "torchrun"
    KUBEFLOW = "kubeflow"


class JobForm(StrEnum):
    """Programs that the converted job can run."""

    TRAINER = "trainer"
    COMMAND = "command"


class EntryEffect(StrEnum):
    """What became of an option or variable of the input."""

    TAKEN = "taken"  # taken over with the same value
    MAPPED = "mapped"  # taken over with another value, or in another form
    DEFAULT = "default"  # not in the input: the tool's own default, which the job states
    SAME = "same"  # needs no field: this is what happens anyway
    UNUSED = "unused"  # not taken over; has no effect on the result
    CHANGED = "changed"  # not taken over; the training differs
    SECRET = "secret"  # noqa: S105 (the name of an effect); not copied; the job refers to a Secret
    UNKNOWN = "unknown"  # no option of the tool has this name
    EDIT = "edit"  # the job contains an assumption that the user has to check
    NOTE = "note"  # how the input was interpreted


NOT_TAKEN_OVER = (EntryEffect.CHANGED, EntryEffect.UNKNOWN)
REPORTED = tuple(effect for effect in EntryEffect if effect is not EntryEffect.TAKEN)


class ConversionError(Exception):
    """Raised for input that cannot be converted; each problem is one line with position and remedy."""

    def __init__(self, *problems: str) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


@dataclass(frozen=True)
class Entry:
    """One option, variable or statement of the input and what became of it."""

    option: str
    effect: EntryEffect
    message: str = ""
    field: str | None = None  # path in the job, such as training.learningRate
    line: int | None = None

    def __str__(self) -> str:
        position = f"line {self.line}: " if self.line is not None else ""
        target = f" -> spec.{self.field}" if self.field else ""
        return (
            f"{position}{self.option}{target}: {self.message}" if self.message else f"{position}{self.option}{target}"
        )


@dataclass(frozen=True)
class VolumeMount:
    """A claim and the path at which the job mounts it."""

    claim: str
    mount_path: str


@dataclass(frozen=True)
class ConversionRequest:
    """What the user states in addition to the input; None is derived from the input or assumed."""

    source: InputKind | None = None
    tool_version: int | None = None
    form: JobForm | None = None
    name: str | None = None
    image: str | None = None
    output_claim: str | None = None
    volumes: tuple[VolumeMount, ...] = ()
    datasets: dict[str, str] = field(default_factory=dict)  # name in the input -> path or Hub id
    gpu_resource: str = "nvidia.com/gpu"
    gpus: int | None = None  # per node
    nodes: int | None = None
    rows: int | None = None  # training rows, to convert a warm-up ratio to steps


@dataclass(frozen=True)
class Conversion:
    """A valid job, and what became of everything in the input."""

    source: str  # such as "ms-swift 3.x: swift sft"
    job: Tree
    entries: tuple[Entry, ...]

    def select(self, *effects: EntryEffect) -> tuple[Entry, ...]:
        """Return the entries with one of the effects, in order."""
        return tuple(entry for entry in self.entries if entry.effect in effects)
