"""How the operator finds the API server, and that its secrets stay where they are."""

import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from finetune_operator.kube.api_client import ApiError, ApiServer
from finetune_operator.kube.credentials import Access, BearerToken, NoAccess, find_access, load_kubeconfig, open_session
from testing.fakes.http_api import HttpApi, serving

SECRET = "s3cr3t"  # noqa: S105  made up
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


def test_a_kubeconfig_gives_server_namespace_and_token(tmp_path: Path) -> None:
    access = load_kubeconfig([write_kubeconfig(tmp_path / "config", user={"token": SECRET})])
    assert (access.server, access.namespace, access.token) == ("http://api.example:6443", "team", SECRET)


def test_the_first_of_several_kubeconfigs_wins(tmp_path: Path) -> None:
    one = write_kubeconfig(tmp_path / "one", user={"token": ONE}, name="dev")
    two = write_kubeconfig(tmp_path / "two", user={"token": TWO}, name="prod")
    assert load_kubeconfig([tmp_path / "absent", one, two]).token == ONE
    assert load_kubeconfig([one, two], context="prod").token == TWO


@pytest.mark.parametrize("way", ["exec", "auth-provider", "username"])
def test_a_login_that_is_not_supported_is_named(tmp_path: Path, way: str) -> None:
    config = write_kubeconfig(tmp_path / "config", user={way: "anything"})
    with pytest.raises(NoAccess, match=f"logs in by {way}.*kubectl create token"):
        load_kubeconfig([config])


@pytest.mark.parametrize(
    ("context", "message"), [("nowhere", "contexts has no entry 'nowhere'"), (None, "no kubeconfig found")]
)
def test_what_is_missing_is_named(tmp_path: Path, context: str | None, message: str) -> None:
    files = [write_kubeconfig(tmp_path / "config", user={})] if context else [tmp_path / "absent"]
    with pytest.raises(NoAccess, match=message):
        load_kubeconfig(files, context=context)


def test_the_kubeconfig_given_beats_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", str(write_kubeconfig(tmp_path / "env", user={"token": ONE})))
    given = write_kubeconfig(tmp_path / "given", user={"token": TWO})
    assert find_access(kubeconfig=str(given)).token == TWO
    assert find_access().token == ONE


def test_a_pod_without_a_mounted_token_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    with pytest.raises(NoAccess, match="service account"):
        find_access()


def test_secrets_are_not_printed() -> None:
    assert SECRET not in repr(Access(server="https://api.example", token=SECRET))


def test_a_token_file_is_read_again_when_it_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "first").write_text("one\n")
    (tmp_path / "second").write_text("two\n")
    (tmp_path / "token").symlink_to("first")
    bearer = BearerToken(Access(server="https://api.example", token_file=tmp_path / "token"))
    assert bearer.current() == "one"
    (tmp_path / "new").symlink_to("second")  # the kubelet swaps a link
    os.replace(tmp_path / "new", tmp_path / "token")
    assert bearer.current() == "two"


async def test_a_rotated_token_is_used_by_the_next_request(tmp_path: Path) -> None:
    token, api = tmp_path / "token", HttpApi()
    token.write_text(ONE)
    api.allowed_token = ONE
    async with serving(api) as url, open_session(Access(server=url, token_file=token), connections=1) as session:
        server = ApiServer(url, calls=session, streams=session)
        await server.call("GET", "/api/v1/pods")
        api.allowed_token = TWO
        with pytest.raises(ApiError, match="Unauthorized"):
            await server.call("GET", "/api/v1/pods")
        token.write_text(THREE)
        api.allowed_token = THREE
        await server.call("GET", "/api/v1/pods")
