"""Command `finetune logs`, which prints the logs of one, several or all nodes of a job."""

import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import closing
from typing import Annotated

import typer

from finetune_api.visible_text import escape_log_line
from finetune_cli.cluster.options import ContextOption, JobArgument, KubeconfigOption, NamespaceOption
from finetune_cli.errors import BadInput
from finetune_cli.terminal import get_raw_stdout
from finetune_client.client import Client
from finetune_client.connection import MAX_LINE_BYTES
from finetune_client.job_logs import LogLine, LogSelection, choose_attempt, choose_nodes

ALL = "all"
LINE_END = "\r\n"


def logs(  # noqa: PLR0913  each flag is a parameter
    name: JobArgument,
    node: Annotated[
        str | None, typer.Option(help="Node ranks, such as 0, 0-3,7 or all (default: 0).", show_default=False)
    ] = None,
    rank: Annotated[
        int | None, typer.Option(help="Read the node of this rank instead.", min=0, show_default=False)
    ] = None,
    attempt: Annotated[
        int | None, typer.Option(help="Number of the attempt (default: the current one).", min=0, show_default=False)
    ] = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Keep printing, also across restarts, until the job ends.")
    ] = False,
    tail: Annotated[
        int | None, typer.Option(help="Begin with the last lines of each node.", min=0, show_default=False)
    ] = None,
    since: Annotated[
        int | None, typer.Option(help="Only lines of the last seconds.", metavar="SECONDS", min=1, show_default=False)
    ] = None,
    timestamps: Annotated[bool, typer.Option("--timestamps", help="Print the time of each line.")] = False,
    saved: Annotated[
        bool, typer.Option("--saved", help="Read the log in the output of the job, also of deleted pods.")
    ] = False,
    namespace: NamespaceOption = None,
    context: ContextOption = None,
    kubeconfig: KubeconfigOption = None,
) -> None:
    """Print the logs of a job's nodes.

    With several nodes, each line begins with its node rank. The ranks of a node share its log; --rank leaves out the
    lines that torch marks with another rank, such as tracebacks. The log of a deleted pod is in the output of the job,
    if it has one: `--saved --attempt N` prints it.
    """
    if node is not None and rank is not None:
        raise BadInput("--rank: selects a node; it excludes --node")
    nodes = parse_ranks(node or "0")
    selection = LogSelection(nodes, rank, attempt, follow=follow, tail_lines=tail, since_seconds=since)
    shows_node = nodes is None or len(nodes) > 1
    if saved and (follow or tail is not None or since is not None or timestamps):
        raise BadInput("--saved: prints the whole log; it excludes --follow, --tail, --since and --timestamps")
    with Client(namespace=namespace, context=context, kubeconfig=kubeconfig) as client:
        if saved:
            _print_saved_logs(client, name, selection)
            return
        last_attempt = None
        for line in client.read_logs(name, selection):
            if last_attempt is not None and line.attempt != last_attempt:
                print(f"--- attempt {line.attempt} ---", file=sys.stderr)
            last_attempt = line.attempt
            text = format_line(line, shows_node=shows_node, shows_time=timestamps)
            _write_line(f"{text}\n".encode(), flush=follow)


def _print_saved_logs(client: Client, name: str, selection: LogSelection) -> None:
    job = client.get(name)
    attempt = choose_attempt(job, selection)
    for node_rank in choose_nodes(job, selection):
        # closing deletes the pod that reads the file, also if standard output is closed
        with closing(client.read_output_file(name, f"logs/attempt-{attempt}/node-{node_rank}.log")) as chunks:
            for line in split_lines(chunks):
                if selection.includes(line.decode(errors="replace")):
                    _write_line(line)
        get_raw_stdout().buffer.flush()


def _write_line(line: bytes, *, flush: bool = False) -> None:
    """Write a line of a program: with its colours on a terminal, otherwise unchanged."""
    stdout = get_raw_stdout()
    if stdout.isatty():
        line = f"{escape_log_line(line.decode(errors='replace').rstrip(LINE_END))}\n".encode()
    stdout.buffer.write(line)
    if flush:
        stdout.buffer.flush()


def split_lines(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the lines of a file that is read in chunks, with their line breaks; a long line in parts."""
    rest = b""
    for chunk in chunks:
        *lines, rest = (rest + chunk).split(b"\n")
        yield from (line + b"\n" for line in lines)
        if len(rest) > MAX_LINE_BYTES:
            yield rest
            rest = b""
    if rest:
        yield rest


def parse_ranks(text: str) -> tuple[int, ...] | None:
    """Parse node ranks such as 0-3,7; None for all. Raises BadInput if the text is not such a list."""
    if text == ALL:
        return None
    ranks: dict[int, None] = {}
    for part in text.split(","):
        match = re.fullmatch(r"(\d{1,4})(?:-(\d{1,4}))?", part, re.ASCII)
        if match is None:
            raise BadInput(f"--node {text[:100]}: expected node ranks such as 0 or 0-3,7, or {ALL}")
        ranks |= dict.fromkeys(range(int(match[1]), int(match[2] or match[1]) + 1))
    return tuple(ranks)


def format_line(line: LogLine, *, shows_node: bool, shows_time: bool) -> str:
    """Return a log line with its node and time in front, as requested."""
    prefix = f"[{line.node_rank}] " if shows_node else ""
    return f"{prefix}{line.time + ' ' if shows_time else ''}{line.text}"
