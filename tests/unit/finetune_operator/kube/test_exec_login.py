"""Tests of kubeconfig users that log in by a plugin."""

import json
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import yaml

from finetune_operator.kube.api_client import ApiClient, ApiError
from finetune_operator.kube.api_paths import collection_path
from finetune_operator.kube.credentials import ClusterCredentials, NoClusterAccess, load_kubeconfig, open_session
from finetune_operator.kube.exec_login import LoginCredential
from testing.fakes.http_api import HttpApi, serve_api

V1 = "client.authentication.k8s.io/v1"
PRINT_COUNTER = """
import json, os, pathlib, sys
counter = pathlib.Path(sys.argv[1])
number = int(counter.read_text()) + 1 if counter.exists() else 1
counter.write_text(str(number))
(counter.parent / "info.json").write_text(os.environ["KUBERNETES_EXEC_INFO"])
status = {"token": f"token-{number}", **json.loads(os.environ.get("STATUS", "{}"))}
print(json.dumps({"apiVersion": "client.authentication.k8s.io/v1", "kind": "ExecCredential", "status": status}))
"""


def write_kubeconfig(
    folder: Path, *, server: str = "http://api.example", program: str = PRINT_COUNTER, **fields: Any
) -> Path:
    section = {
        "apiVersion": V1,
        "command": sys.executable,
        "args": ["-c", program, str(folder / "counter")],
        "installHint": "install it first",
        **fields,
    }
    document = {
        "current-context": "dev",
        "contexts": [{"name": "dev", "context": {"cluster": "dev", "user": "dev"}}],
        "clusters": [{"name": "dev", "cluster": {"server": server}}],
        "users": [{"name": "dev", "user": {"exec": section}}],
    }
    path = folder / "config"
    path.write_text(yaml.safe_dump(document))
    return path


def get_token(credentials: ClusterCredentials) -> str | None:
    assert credentials.credential is not None
    return credentials.credential.token


def test_the_plugin_runs_with_the_environment_of_the_kubeconfig(tmp_path: Path) -> None:
    variables = [{"name": "STATUS", "value": json.dumps({"token": "of the environment"})}]

    credentials = load_kubeconfig([write_kubeconfig(tmp_path, env=variables, provideClusterInfo=True)])

    assert get_token(credentials) == "of the environment"
    info = json.loads((tmp_path / "info.json").read_text())
    assert (info["apiVersion"], info["kind"]) == (V1, "ExecCredential")
    assert info["spec"] == {"interactive": False, "cluster": {"server": "http://api.example"}}


def test_credentials_are_not_part_of_the_repr(tmp_path: Path) -> None:
    assert "token-1" not in repr(load_kubeconfig([write_kubeconfig(tmp_path)]))


async def test_a_rejected_token_is_renewed_once(api: HttpApi, tmp_path: Path) -> None:
    api.allowed_token = "token-2"  # noqa: S105  not a real secret
    async with serve_api(api) as url:
        credentials = load_kubeconfig([write_kubeconfig(tmp_path, server=url)])
        async with open_session(credentials, connections=1) as session:
            client = ApiClient(url, request_session=session, watch_session=session)
            await client.call("GET", collection_path("Pod", None))
            api.allowed_token = "of nobody"  # noqa: S105  not a real secret
            with pytest.raises(ApiError, match="Unauthorized"):
                await client.call("GET", collection_path("Pod", None))

    assert (tmp_path / "counter").read_text() == "3"


async def test_an_expired_token_is_renewed_before_a_request(api: HttpApi, tmp_path: Path) -> None:
    status = {"expirationTimestamp": (datetime.now(UTC) + timedelta(seconds=5)).isoformat()}
    variables = [{"name": "STATUS", "value": json.dumps(status)}]
    api.allowed_token = "token-2"  # noqa: S105  not a real secret
    async with serve_api(api) as url:
        credentials = load_kubeconfig([write_kubeconfig(tmp_path, server=url, env=variables)])
        async with open_session(credentials, connections=1) as session:
            await ApiClient(url, request_session=session, watch_session=session).call(
                "GET", collection_path("Pod", None)
            )

    assert len(api.requests) == 1


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"apiVersion": "client.authentication.k8s.io/v1alpha1"}, "exec.apiVersion is .*v1alpha1; supported are"),
        ({"command": "/no/such/plugin"}, "plugin /no/such/plugin cannot be run: .*; install it first"),
        ({"program": "import sys; sys.exit('log in again')"}, "failed with exit code 1: log in again"),
        ({"program": "print('hello')"}, "printed no ExecCredential with a status"),
        ({"program": "print('[1]')"}, "printed no ExecCredential with a status"),
        ({"program": "print('{\"status\": {}}')"}, "printed neither a token nor a client certificate"),
    ],
    ids=["old protocol", "missing program", "failure", "no JSON", "not an object", "empty status"],
)
def test_a_login_that_fails_is_reported_with_the_user(fields: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(NoClusterAccess, match=f"kubeconfig user 'dev': .*{message}"):
        load_kubeconfig([write_kubeconfig(tmp_path, **fields)])


def test_a_command_with_a_slash_is_relative_to_the_kubeconfig(tmp_path: Path) -> None:
    program = tmp_path / "bin" / "login"
    program.parent.mkdir()
    program.write_text('#!/bin/sh\necho \'{"status": {"token": "relative"}}\'\n')
    program.chmod(0o755)

    assert get_token(load_kubeconfig([write_kubeconfig(tmp_path, command="bin/login", args=[])])) == "relative"


def test_a_credential_expires_before_its_last_seconds() -> None:
    now = datetime(2026, 11, 27, tzinfo=UTC)

    assert LoginCredential("t", expires_at=now + timedelta(seconds=29)).is_expired(now)
    assert not LoginCredential("t", expires_at=now + timedelta(seconds=31)).is_expired(now)
    assert not LoginCredential("t").is_expired(now)


@pytest.mark.parametrize("mode", [None, "IfAvailable", "Never"])
def test_a_plugin_without_a_terminal_reads_no_standard_input(mode: str | None, tmp_path: Path) -> None:
    """The input may belong to another protocol, such as that of `finetune mcp`."""
    program = "import json, sys; print(json.dumps({'status': {'token': 'read: ' + sys.stdin.read()}}))"
    config = write_kubeconfig(tmp_path, program=program, **({"interactiveMode": mode} if mode else {}))
    load = (
        "import sys; from pathlib import Path; from finetune_operator.kube.credentials import load_kubeconfig;"
        "print(load_kubeconfig([Path(sys.argv[1])]).credential.token + '|' + sys.stdin.read())"
    )

    command = (sys.executable, "-c", load, str(config))
    output = subprocess.run(command, input="message", capture_output=True, text=True, check=True).stdout

    assert output == "read: |message\n"


def test_a_plugin_that_never_interacts_does_not_read_from_a_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for stream in (sys.stdin, sys.stderr):
        monkeypatch.setattr(stream, "isatty", lambda: True)

    load_kubeconfig([write_kubeconfig(tmp_path, interactiveMode="Never")])

    assert json.loads((tmp_path / "info.json").read_text())["spec"]["interactive"] is False
