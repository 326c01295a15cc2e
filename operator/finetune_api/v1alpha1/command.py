"""spec.command: a user's program in a user's image, and the spec fields that it excludes or requires."""

from collections.abc import Collection
from typing import Annotated, Self

from pydantic import ConfigDict, Field, StringConstraints, model_validator

from finetune_api.v1alpha1.base import Model, validations

CommandArgument = Annotated[str, StringConstraints(max_length=8192)]

ONE_PROGRAM = "exactly one of script, exec must be set"
ARGS_OF_SCRIPT = "args belong to script; append the arguments of exec to its program"

REQUIRED_WITHOUT_COMMAND = ("model", "dataset", "output")
EXCLUDED_BY_COMMAND = ("model", "dataset", "training", "lora", "deepspeed", "fsdp")
OUTPUT_EXCLUDED_BY_COMMAND = ("output.overwrite", "output.pushToHub")
IMAGE_REQUIRED = "image is required with command: an image with your code and its Python packages"


def required_message(field: str) -> str:
    """Return the message for a missing field of the operator's trainer."""
    return f"{field} is required unless command is set"


def no_effect_message(field: str) -> str:
    """Return the message for a field of the operator's trainer that is set next to command."""
    return f"{field} applies to the operator's trainer and has no effect with command; configure your program instead"


def find_misfits(given: Collection[str]) -> tuple[str, ...]:
    """Return messages for fields that the chosen method lacks or excludes; `given` are the fields that are set."""
    if "command" not in given:
        return tuple(required_message(field) for field in REQUIRED_WITHOUT_COMMAND if field not in given)
    trainer_fields = (*EXCLUDED_BY_COMMAND, *OUTPUT_EXCLUDED_BY_COMMAND)
    problems = tuple(no_effect_message(field) for field in trainer_fields if field in given)
    return problems if "image" in given else (*problems, IMAGE_REQUIRED)


class Command(Model):
    """Your own program instead of the operator's trainer, unmodified, with the same supervision and restarts."""

    script: Annotated[str, StringConstraints(min_length=1, max_length=4096)] | None = Field(
        default=None,
        description="Python script, relative to workingDir, started once per rank with the environment of torchrun.",
    )
    args: tuple[CommandArgument, ...] = Field(
        default=(), max_length=512, description="Arguments of script; $(NAME) is replaced by that environment variable."
    )
    exec: tuple[CommandArgument, ...] = Field(
        default=(),
        max_length=512,
        description="Program with arguments, started once per node, that starts torchrun itself, such as"
        " [swift, sft, ...]; $(NAME) is replaced by that environment variable.",
    )
    working_dir: Annotated[str, StringConstraints(min_length=1, max_length=4096)] | None = Field(
        default=None, description="Working directory (default: that of the image)."
    )

    model_config = ConfigDict(
        json_schema_extra=validations(
            ("has(self.script) != (has(self.exec) && self.exec.size() > 0)", ONE_PROGRAM),
            ("!has(self.args) || self.args.size() == 0 || has(self.script)", ARGS_OF_SCRIPT),
        )
    )

    @model_validator(mode="after")
    def _exactly_one_program(self) -> Self:
        if (self.script is not None) == bool(self.exec):
            raise ValueError(ONE_PROGRAM)
        if self.args and self.script is None:
            raise ValueError(ARGS_OF_SCRIPT)
        return self

    def __str__(self) -> str:
        return " ".join((*(("torchrun", self.script) if self.script else self.exec), *self.args))
