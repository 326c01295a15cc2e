"""Tests of loading credentials, token rotation and redaction of secrets."""

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml
from aiohttp import web
from yarl import URL

from finetune_operator.kube.api_client import ApiClient, ApiError
from finetune_operator.kube.api_paths import collection_path
from finetune_operator.kube.credentials import (
    BearerToken,
    ClusterCredentials,
    NoClusterAccess,
    RedirectRefused,
    find_credentials,
    load_kubeconfig,
    open_session,
)
from testing.fakes.http_api import HttpApi, RecordedRequest, parse_path, serve_api

SECRET = "s3cr3t"  # noqa: S105  not a real secret
ONE, TWO, THREE = "one", "two", "three, and longer"


def write_kubeconfig(
    path: Path, *, user: dict[str, Any], server: str = "http://api.example:6443", name: str = "dev"
) -> Path:
    document = {
        "current-context": name,
        "contexts": [{"name": name, "context": {"cluster": name, "user": name, "namespace": "team"}}],
        "clusters": [{"name": name, "cluster": {"server": "http://api.example:6443"}}],
        "users": [{"name": name, "user": user}],
    }
    path.write_text(yaml.safe_dump(document))
    return path


def test_server_namespace_and_token_are_loaded_from_the_kubeconfig(tmp_path: Path) -> None:
    credentials = load_kubeconfig([write_kubeconfig(tmp_path / "config", user={"token": SECRET})])
    assert (credentials.server, credentials.namespace, credentials.token) == ("http://api.example:6443", "team", SECRET)


def test_first_kubeconfig_takes_precedence(tmp_path: Path) -> None:
    one = write_kubeconfig(tmp_path / "one", user={"token": ONE}, name="dev")
    two = write_kubeconfig(tmp_path / "two", user={"token": TWO}, name="prod")
    assert load_kubeconfig([tmp_path / "absent", one, two]).token == ONE
    assert load_kubeconfig([one, two], context="prod").token == TWO


@pytest.mark.parametrize("method", ["auth-provider", "username"])
def test_error_message_contains_the_unsupported_login_method(tmp_path: Path, method: str) -> None:
    config = write_kubeconfig(tmp_path / "config", user={method: "anything"})
    with pytest.raises(NoClusterAccess, match=f"logs in by {method}.*kubectl create token"):
        load_kubeconfig([config])


@pytest.mark.parametrize(
    ("context", "message"), [("unknown", "contexts has no entry 'unknown'"), (None, "no kubeconfig found")]
)
def test_error_message_contains_the_missing_context_or_file(tmp_path: Path, context: str | None, message: str) -> None:
    files = [write_kubeconfig(tmp_path / "config", user={})] if context else [tmp_path / "absent"]
    with pytest.raises(NoClusterAccess, match=message):
        load_kubeconfig(files, context=context)


def test_an_explicit_kubeconfig_overrides_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", str(write_kubeconfig(tmp_path / "env", user={"token": ONE})))
    explicit = write_kubeconfig(tmp_path / "explicit", user={"token": TWO})
    assert find_credentials(kubeconfig=str(explicit)).token == TWO
    assert find_credentials().token == ONE


def test_missing_service_account_token_raises_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    with pytest.raises(NoClusterAccess, match="service account"):
        find_credentials()


def test_repr_of_credentials_contains_no_secrets() -> None:
    assert SECRET not in repr(ClusterCredentials(server="https://api.example", token=SECRET))


def test_token_file_is_read_again_after_it_was_replaced(tmp_path: Path) -> None:
    (tmp_path / "first").write_text("one\n")
    (tmp_path / "second").write_text("two\n")
    (tmp_path / "token").symlink_to("first")
    bearer = BearerToken(ClusterCredentials(server="https://api.example", token_file=tmp_path / "token"))
    assert bearer.get_token() == "one"
    (tmp_path / "new").symlink_to("second")  # the kubelet rotates tokens by replacing a symbolic link
    os.replace(tmp_path / "new", tmp_path / "token")
    assert bearer.get_token() == "two"


async def test_next_request_uses_the_rotated_token(tmp_path: Path) -> None:
    token, api = tmp_path / "token", HttpApi()
    token.write_text(ONE)
    api.allowed_token = ONE
    async with (
        serve_api(api) as url,
        open_session(ClusterCredentials(server=url, token_file=token), connections=1) as session,
    ):
        client = ApiClient(url, request_session=session, watch_session=session)
        await client.call("GET", collection_path("Pod", None))
        api.allowed_token = TWO
        with pytest.raises(ApiError, match="Unauthorized"):
            await client.call("GET", collection_path("Pod", None))
        token.write_text(THREE)
        api.allowed_token = THREE
        await client.call("GET", collection_path("Pod", None))


class RedirectingApi(HttpApi):
    """API server that redirects every request to another server."""

    target = ""

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.requests.append(RecordedRequest(request.method, parse_path(request.path), {}, None, {}))
        return web.Response(status=307, headers={"Location": f"{self.target}{request.path}"})


@asynccontextmanager
async def connect_to_two_servers() -> AsyncIterator[tuple[aiohttp.ClientSession, str, str, HttpApi]]:
    """Yield a session with a token for a server that redirects, both addresses, and the server that is none of its."""
    api, other = RedirectingApi(), HttpApi()
    async with serve_api(other) as other_url, serve_api(api) as url:
        api.target = other_url
        credentials = ClusterCredentials(server=f"{url}/k8s/clusters/c-1", token=SECRET, impersonation=(("X-As", "a"),))
        async with open_session(credentials, connections=0) as session:
            yield session, url, other_url, other


@pytest.mark.parametrize("method", ["GET", "POST", "PATCH", "DELETE", "WATCH"])
async def test_a_redirect_is_an_error_that_is_not_retried(method: str) -> None:
    async with connect_to_two_servers() as (session, url, _, other):
        client = ApiClient(url, request_session=session, watch_session=session)
        path = collection_path("Pod", "a")
        request = (
            anext(client.watch(path, selector="", version="1"))
            if method == "WATCH"
            else client.call(method, path, body=None if method == "GET" else {})
        )
        with pytest.raises(ApiError, match=r"the answer is a redirect, which is not followed \(HTTP 307\)") as raised:
            await request

    assert (raised.value.status, other.requests) == (307, [])


async def test_a_websocket_follows_no_redirect() -> None:
    async with connect_to_two_servers() as (session, url, _, other):
        with pytest.raises(RedirectRefused):
            await session.ws_connect(f"{url}/api/v1/namespaces/a/pods/b/exec")

    assert other.requests == []


async def test_no_request_is_sent_to_another_server() -> None:
    async with connect_to_two_servers() as (session, url, other_url, other):
        for address in (other_url, url.replace("http:", "https:"), url.replace("127.0.0.1", "localhost")):
            with pytest.raises(aiohttp.ClientError, match="is not the API server"):
                await session.get(f"{address}/version")

    assert other.requests == []


@pytest.mark.parametrize(
    ("url", "is_own"),
    [
        ("https://api.example/api/v1/pods?watch=1", True),
        ("https://API.example:443/", True),
        ("http://api.example/", False),
        ("https://api.example:6443/", False),
        ("https://api.example.evil.example/", False),
        ("https://api.example@evil.example/", False),
    ],
)
def test_a_server_has_one_scheme_host_and_port(url: str, is_own: bool) -> None:
    for server in ("https://api.example", "https://api.example:443/k8s/clusters/c-1"):
        assert ClusterCredentials(server=server).is_server_of(URL(url)) is is_own


async def test_the_token_is_not_added_to_a_request_to_another_server() -> None:
    other = HttpApi()
    bearer = BearerToken(ClusterCredentials(server="http://127.0.0.1:1", token=SECRET))
    async with serve_api(other) as url, aiohttp.ClientSession(middlewares=(bearer,)) as session:
        await session.get(f"{url}/api/v1/namespaces/a/pods")

    assert [request.headers.get("Authorization") for request in other.requests] == [None]
