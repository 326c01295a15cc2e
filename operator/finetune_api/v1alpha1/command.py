"""Defines spec.command, which runs the user's own program in an image of the user."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field, StringConstraints

from finetune_api.v1alpha1.base import CelRule, CrossFieldRule, ModelWithRules

CommandArgument = Annotated[str, StringConstraints(max_length=8192)]


class Command(ModelWithRules):
    """Runs your own program instead of the operator's trainer, unmodified, with the same supervision and restarts."""

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
    progress_from: Literal["log", "posts"] = Field(
        default="log",
        description="Source of status.progress: log, posted progress or, without any, the lines that the program"
        " prints; posts, only posted progress.",
    )

    rules: ClassVar[tuple[CrossFieldRule["Command"], ...]] = (
        CrossFieldRule.from_cel_rule(
            "one program",
            lambda command: (command.script is not None) == bool(command.exec),
            CelRule(
                "has(self.script) != (has(self.exec) && self.exec.size() > 0)",
                "exactly one of script, exec must be set",
            ),
        ),
        CrossFieldRule.from_cel_rule(
            "args belong to script",
            lambda command: bool(command.args) and command.script is None,
            CelRule(
                "!has(self.args) || self.args.size() == 0 || has(self.script)",
                "args belong to script; append the arguments of exec to its program",
            ),
        ),
    )

    def __str__(self) -> str:
        return " ".join((*(("torchrun", self.script) if self.script else self.exec), *self.args))
