"""Read the shell blocks of README.md and docs/, and run them as they are printed (decisions/815).

A block in the language bash runs on a laptop or on a cluster, which follows from its commands, unless a comment in the
line before it contains the reason why no test runs it:

    <!-- not run: it needs GPUs -->

Two other comments describe a block that runs: `<!-- exit code: 1 -->`, and `<!-- interrupted after: Complete -->` for
commands that run until Ctrl-C, here after they have printed `Complete`. An unlabelled block below a shell block, in the
same section, is a part of its output. Output that differs between runs has the language text.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cache
from pathlib import Path

from translations import BLOCK

ROOT = Path(__file__).resolve().parent.parent
CLONE = (  # what the commands use of a clone of the repository
    *("LICENSE", "Makefile", "README.md", "pyproject.toml", "benchmarks", "charts", "manifests", "operator"),
    *("requirements", "testing", "tests", "tools", "trainer"),
)
LOCAL_COMMANDS = frozenset({"convert", "estimate", "plan", "run", "validate"})
PROGRAMS = ("cd", "docker", "finetune", "git", "helm", "kubectl", "make", "pip", "python", "python3", "uv")
CLUSTER_COMMAND = re.compile(
    rf"^(?:kubectl|helm|make cluster-|finetune (?!{'|'.join(sorted(LOCAL_COMMANDS))})[a-z])", re.MULTILINE
)
MARK = re.compile(r"<!-- (?P<key>not run|exit code|interrupted after): (?P<value>.+) -->\n$")
COMMENT_BEFORE = re.compile(r"<!--[^\n]*-->\n$")
HEADING = re.compile(r"^#+ ", re.MULTILINE)
TIMEOUT_SECONDS = 300


class Place(StrEnum):
    """Where a block runs."""

    LAPTOP = "laptop"
    PACKAGE_INDEX = "laptop with a package index"
    CLUSTER = "cluster"
    NOWHERE = "nowhere"


@dataclass(frozen=True)
class CommandBlock:
    """A shell block of a page; `outputs` are the unlabelled blocks below it."""

    page: str
    line: int  # number of the line of the opening fence, starting at 1
    commands: str
    not_run: str = ""
    exit_code: int = 0
    interrupted_after: str = ""
    outputs: tuple[str, ...] = ()

    @property
    def location(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def place(self) -> Place:
        if self.not_run:
            return Place.NOWHERE
        if CLUSTER_COMMAND.search(self.commands):
            return Place.CLUSTER
        return Place.PACKAGE_INDEX if "pip install" in self.commands else Place.LAPTOP


@dataclass(frozen=True)
class CompletedBlock:
    """A block that has run, with its standard output and error in one text."""

    block: CommandBlock
    output: str
    seconds: float

    def __str__(self) -> str:
        first_line = self.block.commands.partition("\n")[0]
        return f"{self.seconds:6.1f} s  {self.block.location}  {first_line}"


def list_pages() -> tuple[Path, ...]:
    """Return the pages with commands: all except decisions and translations, whose blocks equal the English ones."""
    pages = (path for path in (ROOT / "docs").rglob("*.md") if not {"decisions", "zh"} & set(path.parts))
    return ROOT / "README.md", *sorted(pages)


@cache
def list_blocks() -> tuple[CommandBlock, ...]:
    """Return the shell blocks of all pages."""
    return tuple(
        block for path in list_pages() for block in read_blocks(path.read_text(), page=str(path.relative_to(ROOT)))
    )


def select_blocks(place: Place) -> dict[str, tuple[CommandBlock, ...]]:
    """Return the blocks that run in one place, in their order, by page."""
    pages = dict.fromkeys(block.page for block in list_blocks() if block.place is place)
    return {page: tuple(b for b in list_blocks() if b.page == page and b.place is place) for page in pages}


def read_blocks(text: str, *, page: str) -> Iterator[CommandBlock]:
    """Yield the shell blocks of a page.

    Raises:
        ValueError: the line before a block contains an unknown comment.
    """
    block: CommandBlock | None = None
    end = 0
    for match in BLOCK.finditer(text):
        language = match["language"].strip()
        if block and (language == "bash" or HEADING.search(text, end, match.start())):
            yield block
            block = None
        if language == "bash":
            line = text.count("\n", 0, match.start()) + 1
            block = read_mark(text[: match.start()], CommandBlock(page, line, match["content"]))
        elif block and not language:
            block = replace(block, outputs=(*block.outputs, match["content"]))
        end = match.end()
    if block:
        yield block


def read_mark(text_before: str, block: CommandBlock) -> CommandBlock:
    """Return the block with the attributes in the comment before it."""
    if not COMMENT_BEFORE.search(text_before):
        return block
    mark = MARK.search(text_before.splitlines(keepends=True)[-1])
    if mark is None:
        raise ValueError(f"{block.location}: the comment before the block is none of those in {Path(__file__).name}")
    match mark["key"]:
        case "not run":
            return replace(block, not_run=mark["value"])
        case "exit code":
            return replace(block, exit_code=int(mark["value"]))
        case _:
            return replace(block, interrupted_after=mark["value"])


def find_unlabelled_commands(text: str) -> tuple[str, ...]:
    """Return the first lines of the unlabelled blocks that contain commands."""
    return tuple(
        line
        for match in BLOCK.finditer(text)
        if not match["language"].strip()
        for line in match["content"].splitlines()[:1]
        if line.split()[0] in ("$", *PROGRAMS)
    )


def copy_clone(folder: Path) -> Path:
    """Copy what the commands use of a clone of the repository into a folder."""
    ignore = shutil.ignore_patterns("__pycache__")
    folder.mkdir()
    for name in CLONE:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=ignore)
        else:
            shutil.copy(ROOT / name, folder)
    return folder


def build_environment(clone: Path, folder: Path, *programs: Path, **variables: str) -> dict[str, str]:
    """Return environment variables with the programs, and `finetune` and `python` of this environment, on PATH.

    The development environment contains the dependencies of the project without the project itself, so that scripts in
    the new folder start both.
    """
    folder.mkdir()
    for program in programs:
        (folder / program.name).symlink_to(program)
    for name, arguments in (("finetune", "-m finetune_cli "), ("python", "")):
        script = folder / name
        script.write_text(f'#!/bin/sh\nexec {sys.executable} {arguments}"$@"\n')
        script.chmod(0o755)
    python_path = os.pathsep.join(str(clone / name) for name in ("operator", "trainer", "tools", "."))
    path = os.pathsep.join((str(folder), os.environ["PATH"]))
    return {**os.environ, "PATH": path, "PYTHONPATH": python_path, **variables}


def run_block(block: CommandBlock, *, clone: Path, environment: Mapping[str, str]) -> CompletedBlock:
    """Run a block with bash in the folder of the clone.

    Raises:
        AssertionError: it did not end in time with its exit code, or did not print its output.
    """
    started_at = time.monotonic()
    # a shell that runs the tests in the background lets them ignore SIGINT, which the processes would inherit
    shell = ("env", "--default-signal=INT", "bash", "-euo", "pipefail", "-c")
    process = subprocess.Popen(
        (*shell, block.commands),
        cwd=clone,
        env=dict(environment),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    timer = threading.Timer(TIMEOUT_SECONDS, os.killpg, (process.pid, signal.SIGKILL))
    timer.start()
    try:
        output = read_output(process, interrupted_after=block.interrupted_after)
        exit_code = process.wait()
    finally:
        timer.cancel()
    seconds = time.monotonic() - started_at
    report = f"{block.location} ended with {exit_code} after {seconds:.0f} s:\n{block.commands}\n{output}"
    if block.interrupted_after:  # programs differ in their exit codes after Ctrl-C
        assert block.interrupted_after in output, report
        assert exit_code != -signal.SIGKILL, report
    else:
        assert exit_code == block.exit_code, report
    missing = [text for text in block.outputs if text not in use_release_image(output)]
    assert not missing, f"{block.location} did not print\n{''.join(missing)}\nbut\n{output}"
    return CompletedBlock(block, output, seconds)


def read_output(process: subprocess.Popen[str], *, interrupted_after: str) -> str:
    """Return the output of a process; interrupt its group, as Ctrl-C does, after a line with the given text."""
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        if interrupted_after and interrupted_after in line:
            threading.Thread(target=_interrupt, args=(process,), daemon=True).start()
            interrupted_after = ""
    return "".join(lines)


def _interrupt(process: subprocess.Popen[str]) -> None:
    """Send SIGINT until the process has ended: kubectl ignores one that arrives while its watch starts."""
    while process.poll() is None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGINT)
        time.sleep(1)


def use_release_image(output: str) -> str:
    """Return an output with the trainer image of the first release, which the pages contain."""
    return re.sub(r"trainer:\S+", "trainer:v0.1.0", output)


def write_swift_command(clone: Path) -> None:
    """Write train.sh, the command of ms-swift in the page about conversion."""
    page = (ROOT / "docs" / "user-guide" / "convert.md").read_text()
    command = re.search(r"^finetune convert - [^\n]*<<'EOF'\n(.*?)^EOF\n", page, re.MULTILINE | re.DOTALL)
    assert command is not None
    (clone / "train.sh").write_text(command[1])
