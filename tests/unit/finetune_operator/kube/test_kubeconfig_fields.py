"""Tests of the keys of kubeconfigs, with the entries that the tools of clusters write."""

import base64
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from aiohttp import web
from aiohttp.test_utils import TestServer

from finetune_operator.kube.credentials import ClusterCredentials, NoClusterAccess, load_kubeconfig, open_session

V1BETA1 = "client.authentication.k8s.io/v1beta1"
TOKEN = "sha256~t"  # noqa: S105  not a real secret
# "CA", "CERT" and "KEY" stand for PEM in base64, or for the name of a file.
AUTHORITY = {"certificate-authority-data": "CA"}
CERTIFICATE = {"client-certificate-data": "CERT", "client-key-data": "KEY"}
MINIKUBE_EXTENSION = {"extensions": [{"extension": {"provider": "minikube.sigs.k8s.io"}, "name": "cluster_info"}]}
EKS_LOGIN = {"apiVersion": V1BETA1, "command": "aws", "args": ["eks", "get-token"], "env": None}
GKE_LOGIN = {"apiVersion": V1BETA1, "command": "gke-gcloud-auth-plugin", "installHint": "i", "provideClusterInfo": True}
AKS_LOGIN = {"apiVersion": V1BETA1, "command": "kubelogin", "args": ["get-token"], "interactiveMode": "IfAvailable"}
TSH_LOGIN = {"apiVersion": V1BETA1, "command": "tsh", "args": ["kube", "credentials"], "env": None}
TSH_EXTENSION = {"extensions": [{"extension": "prod", "name": "teleport.kube.name"}]}
TOOLS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # cluster and user
    "kind": ({"server": "https://127.0.0.1:38211", **AUTHORITY}, CERTIFICATE),
    "minikube": (
        {"server": "https://192.168.49.2:8443", "certificate-authority": "CA", **MINIKUBE_EXTENSION},
        {"client-certificate": "CERT", "client-key": "KEY", **MINIKUBE_EXTENSION},
    ),
    "EKS": ({"server": "https://A1.gr7.eu-west-1.eks.amazonaws.com", **AUTHORITY}, {"exec": EKS_LOGIN}),
    "GKE": ({"server": "https://34.90.1.2", **AUTHORITY}, {"exec": GKE_LOGIN}),
    "AKS": ({"server": "https://c-1.hcp.westeurope.azmk8s.io:443", **AUTHORITY}, {"exec": AKS_LOGIN}),
    "AKS, local": ({"server": "https://c-1.hcp.azmk8s.io:443", **AUTHORITY}, {**CERTIFICATE, "token": TOKEN}),
    "Rancher": ({"server": "https://rancher.example/k8s/clusters/c-m-1"}, {"token": TOKEN}),
    "k3s": ({"server": "https://127.0.0.1:6443", **AUTHORITY}, CERTIFICATE),
    "Teleport": (
        {"server": "https://proxy.example:3026", **AUTHORITY, **TSH_EXTENSION},
        {"exec": TSH_LOGIN, "as": "reader", "as-groups": ["viewers"]},
    ),
    "OpenShift": ({"server": "https://api.c.example:6443", "insecure-skip-tls-verify": True}, {"token": TOKEN}),
    "kubectl config": (
        {"server": "https://10.0.0.1", "disable-compression": True, "proxy-url": "", "tls-server-name": None},
        {"token": TOKEN, "username": "", "auth-provider": None, "as-groups": [], "as-user-extra": {}},
    ),
}


@pytest.fixture(scope="module")
def pems(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return the files of a self-signed certificate and its key."""
    folder = tmp_path_factory.mktemp("pki")
    certificate, key = folder / "cert.pem", folder / "key.pem"
    command = ("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    subprocess.run((*command, "-subj", "/CN=x", "-out", certificate, "-keyout", key), check=True, capture_output=True)
    return {"CA": certificate, "CERT": certificate, "KEY": key}


@pytest.fixture(autouse=True)
def login_plugins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("aws", "gke-gcloud-auth-plugin", "kubelogin", "tsh"):
        program = tmp_path / "bin" / name
        program.parent.mkdir(exist_ok=True)
        program.write_text(f'#!/bin/sh\necho \'{{"status": {{"token": "{TOKEN}"}}}}\'\n')
        program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=":")


def load(folder: Path, cluster: dict[str, Any], user: dict[str, Any]) -> ClusterCredentials:
    document = {
        "apiVersion": "v1",
        "kind": "Config",
        "preferences": {},
        "current-context": "dev",
        "contexts": [{"name": "dev", "context": {"cluster": "dev", "user": "dev", **MINIKUBE_EXTENSION}}],
        "clusters": [{"name": "dev", "cluster": cluster}],
        "users": [{"name": "dev", "user": user}],
    }
    path = folder / "config"
    path.write_text(yaml.safe_dump(document))
    return load_kubeconfig([path])


def fill_in(entry: dict[str, Any], pems: dict[str, Path]) -> dict[str, Any]:
    def read(key: str, value: Any) -> Any:
        if not isinstance(value, str) or value not in pems:
            return value
        return base64.b64encode(pems[value].read_bytes()).decode() if key.endswith("-data") else str(pems[value])

    return {key: read(key, value) for key, value in entry.items()}


@pytest.mark.parametrize("tool", TOOLS)
def test_kubeconfigs_of_known_tools_are_accepted(tool: str, pems: dict[str, Path], tmp_path: Path) -> None:
    cluster, user = (fill_in(entry, pems) for entry in TOOLS[tool])

    credentials = load(tmp_path, cluster, user)

    login_token = credentials.credential.token if credentials.credential else None
    assert (credentials.token or login_token) == (TOKEN if {"token", "exec"} & user.keys() else None)


@pytest.mark.parametrize(
    ("section", "key", "value", "message"),
    [
        ("cluster", "proxy-url", "http://127.0.0.1:9", "cluster 'dev' has proxy-url, which is not supported; run kube"),
        ("cluster", "tls-server-name", "kube.example", "cluster 'dev' has tls-server-name, which is not supported"),
        ("cluster", "api-version", "v1", "cluster 'dev' has the unknown key api-version; remove it"),
        ("cluster", "server", "10.0.0.1:6443", "cluster 'dev' has the server '10.0.0.1:6443'; expected a URL such as"),
        ("user", "password", "p", "user 'dev' logs in by password, which is not supported; use a token"),
        ("user", "impersonate", "x", "user 'dev' has the unknown key impersonate"),
        ("user", "as-groups", ["viewers"], "user 'dev' has as-uid, as-groups or as-user-extra without as"),
        ("user", "as", ["reader"], "user 'dev' has an invalid value for Impersonate-User; expected strings"),
        ("user", "as", "reader\r\nX: y", "user 'dev' has an invalid value for Impersonate-User; expected strings"),
        ("user", "as-user-extra", ["a"], "user 'dev' has an invalid as-user-extra; expected a map of lists"),
    ],
)
def test_keys_that_cannot_be_honoured_are_refused_by_name(
    section: str, key: str, value: Any, message: str, tmp_path: Path
) -> None:
    entries: dict[str, dict[str, Any]] = {"cluster": {"server": "http://api.example"}, "user": {"token": TOKEN}}
    entries[section][key] = value

    with pytest.raises(NoClusterAccess) as raised:
        load(tmp_path, entries["cluster"], entries["user"])

    assert str(raised.value).startswith(f"kubeconfig {message}")


async def test_every_request_is_sent_as_the_impersonated_user(tmp_path: Path) -> None:
    extra = {"scopes": ["a", "b"], "example.com/team": ["x"]}
    user = {"token": TOKEN, "as": "reader", "as-uid": "u-1", "as-groups": ["viewers", "dev"], "as-user-extra": extra}
    headers: list[tuple[str, str]] = []

    async def handle(request: web.Request) -> web.Response:
        headers.extend((name, value) for name, value in request.headers.items() if name.startswith("Impersonate-"))
        return web.json_response({})

    app = web.Application()
    app.router.add_get("/{path:.*}", handle)
    async with TestServer(app) as server:
        credentials = load(tmp_path, {"server": str(server.make_url(""))}, user)
        async with open_session(credentials, connections=0) as session:
            await session.get(server.make_url("/version"))

    assert headers == [
        ("Impersonate-User", "reader"),
        ("Impersonate-Uid", "u-1"),
        ("Impersonate-Group", "viewers"),
        ("Impersonate-Group", "dev"),
        ("Impersonate-Extra-example.com%2Fteam", "x"),
        ("Impersonate-Extra-scopes", "a"),
        ("Impersonate-Extra-scopes", "b"),
    ]
