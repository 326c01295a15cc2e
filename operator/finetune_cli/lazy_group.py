"""A command group that imports the module of a command when the command runs.

`finetune --help` and shell completion then import no other module of the project, which takes 0.3 s.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any, ClassVar

from typer import Typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

PLAIN_HELP = None  # the value of rich_markup_mode for help without rich, which takes 0.1 s to import

Context = Any  # click.Context, which newer versions of typer contain in a private module


@dataclass(frozen=True)
class LazyCommand:
    """A command that is the function `name` of a module; a test compares `help` with its docstring."""

    module: str
    help: str
    function: str = ""
    passes_arguments: bool = False  # whether arguments after the options belong to another program

    def load(self, name: str) -> Any:
        """Import the module and return the command."""
        app = Typer(add_completion=False, rich_markup_mode=PLAIN_HELP)
        settings = {"allow_interspersed_args": False} if self.passes_arguments else {}
        app.command(name, context_settings=settings)(getattr(import_module(self.module), self.function or name))
        return get_command(app)


class LazyGroup(TyperGroup):
    """Group of lazy commands in the order of `commands_by_name`."""

    commands_by_name: ClassVar[Mapping[str, LazyCommand]] = {}

    def list_commands(self, ctx: Context) -> list[str]:  # noqa: ARG002  signature of click
        """Return the names of all commands."""
        return list(self.commands_by_name)

    def get_command(self, ctx: Context, cmd_name: str) -> TyperCommand | None:  # noqa: ARG002  signature of click
        """Return a command with its help only, for lists of commands."""
        command = self.commands_by_name.get(cmd_name)
        return TyperCommand(cmd_name, help=command.help) if command is not None else None

    def resolve_command(self, ctx: Context, args: list[str]) -> Any:
        """Import the command that is about to run."""
        name, stub, rest = super().resolve_command(ctx, args)
        if name is None or stub is None:
            return name, stub, rest
        return name, self.commands_by_name[name].load(name), rest
