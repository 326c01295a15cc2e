"""Entry point of `finetune`; kubectl runs the same program as the plugin `kubectl finetune`."""

import os
import sys
import threading
from contextlib import suppress
from typing import Any, NoReturn

import typer

from finetune_cli.errors import EXIT_BAD_INPUT, EXIT_CLUSTER, EXIT_FAILED, EXIT_TIMEOUT, BadInput
from finetune_cli.interrupts import Interrupted, raise_on_signals
from finetune_cli.lazy_group import PLAIN_HELP, LazyCommand, LazyGroup
from finetune_cli.terminal import escape_output
from finetune_client.errors import ClientError, JobFailed, WaitTimeout

CLUSTER = "finetune_cli.cluster"


class FinetuneGroup(LazyGroup):
    """All commands, those for a cluster first."""

    commands_by_name = {  # noqa: RUF012  a class variable, as in the base class
        "submit": LazyCommand(f"{CLUSTER}.submit", "Create a job in the cluster."),
        "list": LazyCommand(f"{CLUSTER}.list_jobs", "List the jobs of a namespace.", function="list_jobs"),
        "status": LazyCommand(f"{CLUSTER}.status", "Describe a job: phase, progress, attempts, nodes and output."),
        "why": LazyCommand(f"{CLUSTER}.why", "Explain on one page what happened to a job, and what to do."),
        "wait": LazyCommand(f"{CLUSTER}.wait", "Wait until a job reaches a state or ends."),
        "logs": LazyCommand(f"{CLUSTER}.logs", "Print the logs of a job's nodes."),
        "top": LazyCommand(f"{CLUSTER}.top", "Show memory and step time of each rank of a running job."),
        "events": LazyCommand(f"{CLUSTER}.events", "List the events about a job and its pods."),
        "suspend": LazyCommand(f"{CLUSTER}.control", "Save a checkpoint and release all pods of a job."),
        "resume": LazyCommand(f"{CLUSTER}.control", "Continue a suspended job from its last checkpoint."),
        "cancel": LazyCommand(f"{CLUSTER}.control", "End a job for good, after a checkpoint; its record is kept."),
        "delete": LazyCommand(f"{CLUSTER}.control", "Delete a job and its pods; its output is kept."),
        "exec": LazyCommand(
            f"{CLUSTER}.execute", "Run a program in a pod of a job.", function="execute", passes_arguments=True
        ),
        "cp": LazyCommand(f"{CLUSTER}.cp", "Copy the result or other files of a job to this machine."),
        "report": LazyCommand(f"{CLUSTER}.report", "Open the report of a complete job: curves, memory, environment."),
        "doctor": LazyCommand(f"{CLUSTER}.doctor", "Check the cluster, the operator, your rights, storage and GPUs."),
        "mcp": LazyCommand("finetune_cli.mcp", "Serve the jobs of a namespace to an agent (MCP)."),
        "convert": LazyCommand("finetune_cli.convert", "Print a FineTuneJob for a command or config of another tool."),
        "run": LazyCommand("finetune_cli.run", "Run a job on this machine."),
        "validate": LazyCommand(
            "finetune_cli.validate", "Check the fields of a job file, their types and consistency."
        ),
        "plan": LazyCommand("finetune_cli.plan", "Print the objects that the operator would create for a job."),
        "estimate": LazyCommand("finetune_cli.estimate", "Forecast the memory of a job from its model's config."),
    }

    def main(self, *arguments: Any, **options: Any) -> Any:
        """Run a command, whose output shows control characters as escapes."""
        escape_output()
        return super().main(*arguments, **options)


app = typer.Typer(
    cls=FinetuneGroup,
    no_args_is_help=True,
    rich_markup_mode=PLAIN_HELP,
    pretty_exceptions_enable=False,
)


@app.callback()
def describe() -> None:
    """Fine-tune language models on a Kubernetes cluster, or on this machine."""


def main() -> None:
    """Run the command-line interface; errors are printed as one line per problem and end with their exit code."""
    raise_on_signals()
    try:
        app()
    except Interrupted as error:
        _exit_soon(error.code)
    except BadInput as error:
        _exit(EXIT_BAD_INPUT, *error.problems)
    except JobFailed as error:
        _exit(EXIT_FAILED, str(error))
    except WaitTimeout as error:
        _exit(EXIT_TIMEOUT, str(error))
    except ClientError as error:
        _exit(EXIT_CLUSTER, str(error))
    except BrokenPipeError:  # the reader of a pipe, such as head, has ended
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _exit_soon(code: int) -> NoReturn:
    """Exit within seconds; the end of the interpreter would wait for a thread that runs a login plugin."""
    for thread in threading.enumerate():
        if thread is not threading.current_thread():
            thread.join(timeout=1.0)  # another thread may just remove the temporary file of a client key
    with suppress(OSError):
        sys.stdout.flush()
    os._exit(code)


def _exit(code: int, *lines: str) -> None:
    for line in lines:
        print(line, file=sys.stderr)
    sys.exit(code)
