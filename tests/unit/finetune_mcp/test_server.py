"""Tests of the MCP server with the client of the MCP library and an in-memory API server."""

import json
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from mcp import Client, StdioServerParameters
from mcp.client.stdio import stdio_client
from mcp.server import MCPServer

from finetune_api.v1alpha1.status import AttemptRecord, AttemptState, Condition, Display, Fault, JobStatus, Phase
from finetune_client.async_client import AsyncClient
from finetune_mcp.change_tools import ChangeTools
from finetune_mcp.read_tools import MAX_LOG_CHARACTERS, ReadTools
from finetune_mcp.server import build_server
from testing.builders.job_files import job_body
from testing.builders.jobs import NOW
from testing.fakes.job_api import NAMESPACE, JobApi, serve_jobs

FAILED = JobStatus(
    phase=Phase.FAILED,
    attempt=1,
    completion_time=NOW,
    attempts=(
        AttemptRecord(attempt=1, state=AttemptState.FAILED, reason="DatasetError", fault=Fault.USER, message="row 3"),
    ),
    conditions=(
        Condition(type="Failed", status="True", last_transition_time=NOW, reason="DatasetError", message="row 3"),
    ),
)
RUNNING = JobStatus(phase=Phase.RUNNING, attempt=1, display=Display(nodes="2/2", progress="40% 4/10", loss="1.3"))


@pytest.fixture
async def api(tmp_path: Path) -> AsyncIterator[JobApi]:
    async with serve_jobs(tmp_path, JobApi()) as api:
        yield api


@pytest.fixture
async def server(api: JobApi, tmp_path: Path) -> AsyncIterator[MCPServer]:
    """Return a server that allows changes."""
    async with AsyncClient(kubeconfig=str(tmp_path / "kubeconfig")) as client:
        yield build_server(client, allow_changes=True)


async def call(server: MCPServer, tool: str, **arguments: Any) -> Any:
    """Call a tool that succeeds and return its result."""
    async with Client(server) as agent:
        result = await agent.call_tool(tool, arguments)
    assert not result.is_error, result.content
    structured = result.structured_content
    if isinstance(structured, dict):
        return structured.get("result", structured)
    return json.loads(result.content[0].text)  # type: ignore[union-attr]  # all our tools return text


async def get_error(server: MCPServer, tool: str, **arguments: Any) -> str:
    """Call a tool that fails and return its message."""
    async with Client(server) as agent:
        result = await agent.call_tool(tool, arguments)
    assert result.is_error
    return str(result.content[0].text)  # type: ignore[union-attr]  # all our tools return text


async def test_a_server_offers_only_tools_that_read_unless_changes_are_allowed(api: JobApi, tmp_path: Path) -> None:
    async with AsyncClient(kubeconfig=str(tmp_path / "kubeconfig")) as client:
        reading = {tool.__name__ for tool in ReadTools(client).list_tools()}
        changing = {tool.__name__ for tool in ChangeTools(client).list_tools()}
        for allow_changes, expected in ((False, reading), (True, reading | changing)):
            async with Client(build_server(client, allow_changes=allow_changes)) as agent:
                tools = (await agent.list_tools()).tools
            assert {tool.name for tool in tools} == expected
            assert {tool.name for tool in tools if tool.annotations and tool.annotations.read_only_hint} == reading
            assert all(tool.description for tool in tools)


async def test_jobs_are_listed_with_their_progress(server: MCPServer, api: JobApi) -> None:
    api.put_job(RUNNING, numNodes=2)

    assert await call(server, "list_jobs") == [
        {
            "name": "bert",
            "phase": "Running",
            "nodes": 2,
            "progress": "40% 4/10",
            "loss": "1.3",
            "eta": "",
            "restarts": 0,
        }
    ]


async def test_a_failed_job_is_explained(server: MCPServer, api: JobApi) -> None:
    api.put_job(FAILED)

    explanation = await call(server, "explain_job", name="bert")

    assert explanation["headline"] == "bert has failed: DatasetError: row 3"
    assert explanation["advice"][0].startswith("correct the row")


async def test_a_log_is_bounded(server: MCPServer, api: JobApi) -> None:
    api.put_job(RUNNING)
    api.logs = {"bert-1-0": [f"2026-11-27T10:00:00.000000000Z {'x' * 1000}" for _ in range(500)]}

    text = await call(server, "read_log", name="bert", lines=10_000)

    assert len(text) == MAX_LOG_CHARACTERS
    assert api.log_requests[0][1]["tailLines"] == "200"


async def test_an_unknown_job_is_an_error_of_the_tool(server: MCPServer) -> None:
    assert "team/none: " in await get_error(server, "get_job", name="none")


async def test_a_job_is_created_only_with_the_confirmation_of_its_preview(server: MCPServer, api: JobApi) -> None:
    manifest = yaml.safe_dump(job_body(name="new", numNodes=2))

    preview = await call(server, "submit_job", manifest=manifest)

    assert preview["preview"].startswith("creates a job team/new with 2 nodes x ")
    assert ("finetunejobs", NAMESPACE, "new") not in api.objects
    other = yaml.safe_dump(job_body(name="new", numNodes=4))
    wrong = await get_error(server, "submit_job", manifest=other, confirmation=preview["confirmation"])
    assert "does not belong to this change" in wrong
    assert ("finetunejobs", NAMESPACE, "new") not in api.objects

    done = await call(server, "submit_job", manifest=manifest, confirmation=preview["confirmation"])

    assert done["done"]
    assert ("finetunejobs", NAMESPACE, "new") in api.objects


@pytest.mark.parametrize(
    ("manifest", "message"),
    [
        ("a: [", "the manifest is no YAML"),
        ("[1]", r"metadata.name: is required"),
        ("a: &x [1]\nmetadata: {name: *x}", "contains YAML aliases"),
        ("x" * 100_001, "more than 100000 characters"),
        (yaml.safe_dump(job_body(numNodes=0)), "spec.numNodes: must be greater"),
    ],
    ids=["syntax", "list", "alias", "too long", "invalid field"],
)
async def test_an_invalid_manifest_is_an_error_of_the_tool(manifest: str, message: str, server: MCPServer) -> None:
    assert message in await get_error(server, "submit_job", manifest=manifest)


@pytest.mark.parametrize(("tool", "suspend"), [("suspend_job", True), ("resume_job", False)])
async def test_suspend_and_resume_need_a_confirmation(tool: str, suspend: bool, server: MCPServer, api: JobApi) -> None:
    api.put_job(RUNNING, suspend=not suspend)

    preview = await call(server, tool, name="bert")
    assert api.objects["finetunejobs", NAMESPACE, "bert"]["spec"]["suspend"] is not suspend
    await call(server, tool, name="bert", confirmation=preview["confirmation"])

    assert api.objects["finetunejobs", NAMESPACE, "bert"]["spec"]["suspend"] is suspend


async def test_cancel_needs_a_confirmation(server: MCPServer, api: JobApi) -> None:
    api.put_job(RUNNING)

    preview = await call(server, "cancel_job", name="bert")
    assert preview["preview"] == "cancels team/bert, which is Running 40% 4/10"
    await call(server, "cancel_job", name="bert", confirmation=preview["confirmation"])

    assert api.objects["finetunejobs", NAMESPACE, "bert"]["spec"]["cancel"] is True


async def test_a_confirmation_does_not_delete_a_recreated_job(server: MCPServer, api: JobApi) -> None:
    api.put_job(RUNNING)
    confirmation = (await call(server, "delete_job", name="bert"))["confirmation"]
    api.remove("finetunejobs", "bert", namespace=NAMESPACE)
    api.put_job(RUNNING)

    assert "does not belong" in await get_error(server, "delete_job", name="bert", confirmation=confirmation)

    confirmation = (await call(server, "delete_job", name="bert"))["confirmation"]
    assert (await call(server, "delete_job", name="bert", confirmation=confirmation))["done"]
    assert ("finetunejobs", NAMESPACE, "bert") not in api.objects


async def test_the_command_serves_an_agent_on_standard_input_and_output(api: JobApi, tmp_path: Path) -> None:
    api.put_job(RUNNING)
    arguments = ["-m", "finetune_cli", "mcp", "--kubeconfig", str(tmp_path / "kubeconfig")]
    parameters = StdioServerParameters(command=sys.executable, args=arguments, env=dict(os.environ))
    async with Client(stdio_client(parameters)) as agent:
        result = await agent.call_tool("list_jobs", {})
        tools = {tool.name for tool in (await agent.list_tools()).tools}

    assert result.structured_content is not None
    assert result.structured_content["result"][0]["name"] == "bert"
    assert "delete_job" not in tools
