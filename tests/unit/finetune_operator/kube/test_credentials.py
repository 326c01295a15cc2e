"""Tests of loading credentials, token rotation and redaction of secrets."""

import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from finetune_operator.kube.api_client import ApiClient, ApiError
from finetune_operator.kube.api_paths import collection_path
from finetune_operator.kube.credentials import (
    BearerToken,
    ClusterCredentials,
    NoClusterAccess,
    find_credentials,
    load_kubeconfig,
    open_session,
)
from testing.fakes.http_api import HttpApi, serve_api

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
