"""Tests that pages about commands of other tools print the real output of finetune convert.

UPDATE_GOLDENS=1 writes the jobs into the pages; review their diff.
"""

import os
import re
import shlex
from dataclasses import dataclass
from pathlib import Path

import pytest
from typer.testing import CliRunner

from finetune_cli.app import app

ROOT = Path(__file__).parents[3]
EXAMPLES = ROOT / "manifests" / "examples"
NAMES = ("how-to/batch-size", "how-to/data-parallel", "how-to/dpo", "how-to/multi-node", "user-guide/convert")
PAGES = {f"{folder}/{name}": ROOT / folder / f"{name}.md" for folder in ("docs", "docs/zh") for name in NAMES}
GUIDES = [page for page in PAGES if "how-to" in page]
EXAMPLE_OF_GUIDE = {"batch-size": "internvl", "data-parallel": "one-node-four-gpus", "multi-node": "qwen2-vl"}
SECTION = re.compile(
    r"^```bash\nfinetune convert - (?P<flags>[^\n]+) <<'EOF'\n(?P<text>.*?)^EOF\n```\n"
    r"[^`]*^```yaml\n(?P<job>.*?)^```\n(?P<prose>.*?)(?=^## )",
    re.MULTILINE | re.DOTALL,
)
ENTRY = re.compile(r"`(line \d+: [^`]+|\w+\s->\sspec\.[^`]+)`")
NODES = re.compile(r"^nodes +(.+)$", re.MULTILINE)
EFFECTIVE_BATCH = re.compile(r"^batch .* = (\d+) ", re.MULTILINE)


@dataclass(frozen=True)
class ConvertedCommand:
    """A command in a page, the job below it, and the entries that the text below the job quotes."""

    flags: tuple[str, ...]
    text: str
    job: str
    entries: tuple[str, ...]


def read_commands(page: Path) -> list[ConvertedCommand]:
    return [
        ConvertedCommand(
            tuple(shlex.split(match["flags"])),
            match["text"],
            match["job"],
            tuple(" ".join(entry.split()) for entry in ENTRY.findall(match["prose"])),
        )
        for match in SECTION.finditer(page.read_text())
    ]


def run_convert(command: ConvertedCommand, *flags: str) -> str:
    result = CliRunner().invoke(
        app, ["convert", "-", *command.flags, *flags], input=command.text, catch_exceptions=False
    )
    assert result.exit_code == 0
    return result.stdout


def run_plan(path: Path) -> str:
    result = CliRunner().invoke(app, ["plan", "-o", "summary", str(path)], catch_exceptions=False)
    assert result.exit_code == 0
    return result.stdout


@pytest.mark.parametrize("page", PAGES)
def test_job_in_a_page_is_the_output_of_the_program(page: str) -> None:
    (command,) = read_commands(PAGES[page])
    job = run_convert(command)
    if os.environ.get("UPDATE_GOLDENS") == "1":
        PAGES[page].write_text(PAGES[page].read_text().replace(command.job, job))
        (command,) = read_commands(PAGES[page])

    assert command.job == job


@pytest.mark.parametrize("page", GUIDES)
def test_entries_that_a_guide_quotes_are_in_the_list_of_the_program(page: str) -> None:
    (command,) = read_commands(PAGES[page])
    entries = [line.strip() for line in run_convert(command, "--output", "summary").splitlines()]

    assert len(command.entries) >= 2
    assert [entry for entry in command.entries if entry not in entries] == []


@pytest.mark.parametrize("page", PAGES)
def test_job_in_a_page_is_valid(page: str, tmp_path: Path) -> None:
    (command,) = read_commands(PAGES[page])
    path = tmp_path / "job.yaml"
    path.write_text(command.job)

    assert CliRunner().invoke(app, ["validate", str(path)], catch_exceptions=False).exit_code == 0


@pytest.mark.parametrize("guide", EXAMPLE_OF_GUIDE)
def test_converted_job_has_the_ranks_and_effective_batch_of_the_example(guide: str, tmp_path: Path) -> None:
    (command,) = read_commands(PAGES[f"docs/how-to/{guide}"])
    path = tmp_path / "job.yaml"
    path.write_text(command.job)
    plan, example = run_plan(path), run_plan(EXAMPLES / f"{EXAMPLE_OF_GUIDE[guide]}.yaml")

    for field in (NODES, EFFECTIVE_BATCH):
        assert len(field.findall(plan)) == 1
        assert field.findall(plan) == field.findall(example)
