"""Tests of shell completion, for `finetune` and for the kubectl plugin."""

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from testing.fakes.job_api import JobApi, serve_jobs


@pytest.fixture
async def api(tmp_path: Path) -> AsyncIterator[JobApi]:
    async with serve_jobs(tmp_path, JobApi()) as api:
        for name in ("bert", "bart", "qwen"):
            api.put_job(name=name)
        yield api


async def complete(folder: Path, *words: str) -> tuple[list[str], str]:
    """Return the completions of `kubectl finetune WORDS`, and the directive for kubectl."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "finetune_cli.kubectl_completion", *words),
        env={**os.environ, "KUBECONFIG": str(folder / "kubeconfig")},
        stdout=subprocess.PIPE,
    )
    output, _ = await process.communicate()
    *lines, directive = output.decode().splitlines()
    return [line for line in lines if line], directive


async def test_commands_are_completed(tmp_path: Path) -> None:
    assert await complete(tmp_path, "s") == (["submit", "status", "suspend"], ":4")


async def test_names_of_jobs_are_completed_from_the_cluster(api: JobApi, tmp_path: Path) -> None:
    assert await complete(tmp_path, "logs", "b") == (["bart", "bert"], ":4")
    assert await complete(tmp_path, "status", "--namespace", "other", "b") == ([], ":4")


async def test_without_a_cluster_no_name_is_completed(tmp_path: Path) -> None:
    assert await complete(tmp_path, "logs", "b") == ([], ":4")
