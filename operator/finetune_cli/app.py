"""Entry point of `finetune`; kubectl runs the same program as the plugin `kubectl finetune`."""

import sys

import typer

from finetune_cli.convert import convert
from finetune_cli.errors import EXIT_BAD_INPUT, BadInput
from finetune_cli.estimate import estimate
from finetune_cli.logs import logs
from finetune_cli.plan import plan
from finetune_cli.run import run
from finetune_cli.status import status
from finetune_cli.validate import validate

app = typer.Typer(
    help="Fine-tune language models on a Kubernetes cluster, or on this machine.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
for command in (run, plan, validate, convert, estimate, status, logs):
    app.command()(command)


def main() -> None:
    """Run the command-line interface; on BadInput, print one line per problem and exit with code 2."""
    try:
        app()
    except BadInput as error:
        for problem in error.problems:
            print(problem, file=sys.stderr)
        sys.exit(EXIT_BAD_INPUT)
