"""Tests that the shell blocks of the pages are found, and that each of them runs or has a reason why it does not.

The blocks themselves run in tests/integration/test_documented_commands.py and tests/e2e/test_documented_commands.py.
"""

import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from testing.documented_commands import (
    LOCAL_COMMANDS,
    ROOT,
    CommandBlock,
    Place,
    find_unlabelled_commands,
    list_blocks,
    list_pages,
    read_blocks,
    run_block,
    select_blocks,
)
from translations import BLOCK


def test_unknown_comment_before_a_block_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"page\.md:2: the comment before the block"):
        list(read_blocks("<!-- not tested: it needs GPUs -->\n```bash\nls\n```\n", page="page.md"))


def test_each_block_of_the_pages_is_in_one_place() -> None:
    selected = [block for place in Place for blocks in select_blocks(place).values() for block in blocks]
    fences = sum(len(re.findall(r"^```bash$", path.read_text(), re.MULTILINE)) for path in list_pages())

    assert Counter(selected) == Counter(list_blocks())
    assert len(selected) == fences > 45
    places = Counter(block.place for block in selected)
    assert places[Place.LAPTOP] > 12
    assert places[Place.CLUSTER] > 18
    assert places[Place.NOWHERE] < 20


@pytest.mark.parametrize("page", list_pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_are_in_blocks_with_the_language_bash(page: Path) -> None:
    assert find_unlabelled_commands(page.read_text()) == ()


def test_local_commands_are_commands_of_the_program() -> None:
    help_text = subprocess.run((sys.executable, "-m", "finetune_cli", "--help"), capture_output=True, check=True).stdout

    assert set(re.findall(r"^\W*(\w+) ", help_text.decode(), re.MULTILINE)) >= LOCAL_COMMANDS


def run_commands(commands: str, folder: Path, *, interrupted_after: str = "") -> str:
    block = CommandBlock("page.md", 1, commands, interrupted_after=interrupted_after, outputs=("two\n",))
    return run_block(block, clone=folder, environment=os.environ).output


def test_block_ends_at_its_first_failing_command(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"page\.md:1 ended with 1 after 0 s:\nfalse\n"):
        run_commands("false\necho two\n", tmp_path)


def test_block_that_does_not_print_its_output_is_an_error(tmp_path: Path) -> None:
    assert run_commands("echo one\necho two\n", tmp_path) == "one\ntwo\n"
    with pytest.raises(AssertionError, match=r"did not print\ntwo\n"):
        run_commands("echo one\n", tmp_path)


def test_block_is_interrupted_after_its_text(tmp_path: Path) -> None:
    assert run_commands("echo two\nsleep 600\n", tmp_path, interrupted_after="two") == "two\n"


@pytest.mark.parametrize(
    "page", [page for page in list_pages() if "```python\n" in page.read_text()], ids=lambda p: p.stem
)
def test_names_in_python_blocks_are_defined(page: Path) -> None:
    code = "\n".join(match["content"] for match in BLOCK.finditer(page.read_text()) if match["language"] == "python")
    command = (sys.executable, "-m", "ruff", "check", "--isolated", "--select=F821", "-")

    checked = subprocess.run(command, input=code, capture_output=True, text=True, check=False)

    assert checked.returncode == 0, checked.stdout
