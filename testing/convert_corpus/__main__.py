"""Checks that the inputs of the conversion corpus are accepted by the parsers of their tools.

Each tool has an environment of its own in FINETUNE_CACHE. Writes a table to build/convert-corpus.md. The exit code
is 1 if a parser rejects an input that is not wrong on purpose, accepts one that is, or cannot be installed.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from itertools import groupby
from pathlib import Path

from testing.convert_corpus import tool_parser
from testing.convert_corpus.parser_calls import NOT_PARSED, REJECTED, ParserCall, list_calls
from testing.peer_environment import NotInstalled, ensure_python, read_version

ROOT = Path(__file__).resolve().parents[2]
CORPUS = ROOT / "tests/unit/finetune_convert/corpus"
REPORT = ROOT / "build/convert-corpus.md"
TIMEOUT_SECONDS = 300
ENVIRONMENTS = {  # parser -> tool, and the lock file of its environment; the others are in our own environment
    "swift-2": ("ms-swift", "parsers/ms-swift-2"),
    "swift-3": ("ms-swift", "parsers/ms-swift-3"),
    "swift-4": ("ms-swift", "ms-swift"),
    "llamafactory": ("llamafactory", "parsers/llamafactory"),
    "axolotl": ("axolotl", "parsers/axolotl"),
}
OWN_PACKAGES = {"torchrun": "torch", "torch.distributed.launch": "torch"}


@dataclass(frozen=True)
class ParserResult:
    """Whether a parser accepted an input: its error, or "" without one."""

    call: ParserCall
    tool: str  # name and version
    error: str

    @property
    def is_expected(self) -> bool:
        """Whether the parser accepts exactly the inputs that are not wrong on purpose."""
        return bool(self.error) == (self.call.input in REJECTED)

    def render(self) -> str:
        """Return the row of the table."""
        verdict = "accepted" if not self.error else self.error.replace("|", "\\|")
        expected = "" if self.is_expected else " **unexpected**"
        reason = f" ({REJECTED[self.call.input]})" if self.error and self.call.input in REJECTED else ""
        return f"| {self.call.input} | {self.tool} | {self.call.parser} | {verdict}{reason}{expected} |"


def main() -> int:
    """Run all parsers, write the table, and return the exit code."""
    inputs = sorted(CORPUS.iterdir())
    calls = sorted((call for path in inputs for call in list_calls(path)), key=lambda call: call.parser)
    results: list[ParserResult] = []
    problems: list[str] = []
    for parser, group in groupby(calls, key=lambda call: call.parser):
        try:
            results += run_parser(parser, list(group))
        except NotInstalled as error:
            problems.append(f"{parser}: not run: {error}")
    REPORT.parent.mkdir(exist_ok=True)
    REPORT.write_text(render_report(results))
    problems += [result.render() for result in results if not result.is_expected]
    accepted = {result.call.input for result in results} - {result.call.input for result in results if result.error}
    rejected = len({result.call.input for result in results if result.error})
    print("\n".join([*problems, f"{len(inputs)} inputs: {len(accepted)} accepted by the parsers of their tools,"]))
    print(f"{rejected} rejected, {len(NOT_PARSED)} without a parser; table: {REPORT.relative_to(ROOT)}")
    return 1 if problems else 0


def run_parser(parser: str, calls: Sequence[ParserCall]) -> list[ParserResult]:
    """Return the results of one parser, which runs in the environment of its tool without network.

    Raises: NotInstalled
    """
    if parser in ENVIRONMENTS:
        tool, lock = ENVIRONMENTS[parser]
        python = ensure_python(Path(os.environ["FINETUNE_CACHE"]), tool, lock=lock)
        tool = f"{tool} {read_version(tool, lock)}"
    else:
        python, package = Path(sys.executable), OWN_PACKAGES.get(parser, parser)
        tool = f"{package} {version(package)}"
    with tempfile.TemporaryDirectory() as scratch:
        calls_path, results_path = Path(scratch) / "calls.json", Path(scratch) / "results.json"
        calls_path.write_text(json.dumps([call.content for call in calls]))
        process = subprocess.run(
            [python, tool_parser.__file__, parser, calls_path, results_path],
            cwd=scratch,
            env={"PATH": os.environ["PATH"], "HOME": scratch, "HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1"},
            capture_output=True,
            text=True,
            timeout=TIMEOUT_SECONDS,
        )
        if process.returncode != 0:
            raise NotInstalled(f"its parser does not start: {process.stderr[-500:]}")
        errors = json.loads(results_path.read_text())
    return [ParserResult(call, tool, error) for call, error in zip(calls, errors, strict=True)]


def render_report(results: Sequence[ParserResult]) -> str:
    """Return a table of all inputs."""
    rows = [result.render() for result in sorted(results, key=lambda result: result.call.input)]
    rows += [f"| {name} | | | not run: {reason} |" for name, reason in NOT_PARSED.items()]
    return "\n".join(["| input | version | parser | result |", "| --- | --- | --- | --- |", *rows, ""])


if __name__ == "__main__":
    sys.exit(main())
