"""Tests of the modules that the command line and the client import, because imports determine their response time."""

import subprocess
import sys

import pytest

HEAVY = ("aiohttp", "asyncio", "finetune_api", "finetune_operator", "kopf", "mcp", "pydantic", "rich", "torch", "yaml")
PRINT_HELP = """
from typer.testing import CliRunner
from finetune_cli.app import app
assert "submit" in CliRunner().invoke(app, ["--help"]).output
"""


@pytest.mark.parametrize("program", [PRINT_HELP, "import finetune_client"], ids=["finetune --help", "client"])
def test_help_and_import_of_the_client_load_no_other_package(program: str) -> None:
    report = "import sys; print(*{name.partition('.')[0] for name in sys.modules})"
    output = subprocess.run(
        [sys.executable, "-c", f"{program}\n{report}"], capture_output=True, text=True, check=True
    ).stdout

    assert not set(HEAVY) & set(output.split())


def test_the_names_of_the_client_are_imported_on_first_use() -> None:
    import finetune_client

    assert [name for name in finetune_client.__all__ if not hasattr(finetune_client, name)] == []
    with pytest.raises(AttributeError, match="has no attribute 'Missing'"):
        _ = finetune_client.Missing
