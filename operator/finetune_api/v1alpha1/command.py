"""spec.command: the user's own program in the user's own image, and what goes with it and what does not."""

from collections.abc import Collection
from typing import Annotated, Self

from pydantic import ConfigDict, Field, StringConstraints, model_validator

from finetune_api.v1alpha1.base import Model, validations

Word = Annotated[str, StringConstraints(max_length=8192)]

ONE_PROGRAM = "exactly one of script, exec must be set"
ARGS_OF_SCRIPT = "args are arguments of script; write those of exec behind its program"

NEEDED_BY_TRAINER = ("model", "dataset", "output")
NOT_BESIDE_COMMAND = ("model", "dataset", "training", "lora", "deepspeed", "fsdp")
OUTPUT_NOT_BESIDE_COMMAND = ("output.overwrite", "output.pushToHub")
IMAGE_NEEDED = "image is required with command: the image that holds your code and its Python packages"


def needed(field: str) -> str:
    """Why a field of the operator's own trainer is missed."""
    return f"{field} is required; only command goes without it"


def not_beside_command(field: str) -> str:
    """Why a field of the operator's own trainer is refused."""
    return f"{field} is for the operator's own trainer and has no effect with command; give it to your program instead"


def misfits(given: Collection[str]) -> tuple[str, ...]:
    """What the operator's own trainer misses among the fields of a spec, or what a command has no use for."""
    if "command" not in given:
        return tuple(needed(field) for field in NEEDED_BY_TRAINER if field not in given)
    trainers_own = (*NOT_BESIDE_COMMAND, *OUTPUT_NOT_BESIDE_COMMAND)
    idle = tuple(not_beside_command(field) for field in trainers_own if field in given)
    return idle if "image" in given else (*idle, IMAGE_NEEDED)


class Command(Model):
    """Your own program, unmodified, in your own image, under the same supervision, restarts and reports."""

    script: Annotated[str, StringConstraints(min_length=1, max_length=4096)] | None = Field(
        default=None,
        description="A Python script that is started once per rank, as torchrun would; relative to workingDir.",
    )
    args: tuple[Word, ...] = Field(
        default=(), max_length=512, description="Arguments of script; $(NAME) becomes that environment variable."
    )
    exec: tuple[Word, ...] = Field(
        default=(),
        max_length=512,
        description="A program with its arguments, started once per node, which starts torchrun itself, such as"
        " [swift, sft, ...]; $(NAME) becomes that environment variable.",
    )
    working_dir: Annotated[str, StringConstraints(min_length=1, max_length=4096)] | None = Field(
        default=None, description="Folder to start in (default: the image's own)."
    )

    model_config = ConfigDict(
        json_schema_extra=validations(
            ("has(self.script) != (has(self.exec) && self.exec.size() > 0)", ONE_PROGRAM),
            ("!has(self.args) || self.args.size() == 0 || has(self.script)", ARGS_OF_SCRIPT),
        )
    )

    @model_validator(mode="after")
    def _one_program(self) -> Self:
        if (self.script is not None) == bool(self.exec):
            raise ValueError(ONE_PROGRAM)
        if self.args and self.script is None:
            raise ValueError(ARGS_OF_SCRIPT)
        return self

    def __str__(self) -> str:
        return " ".join((*(("torchrun", self.script) if self.script else self.exec), *self.args))
