"""Where the API server is and how to be let in: a pod's service account, or a kubeconfig for development."""

import base64
import os
import socket
import ssl
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import yaml

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
LONGEST_LINE = 8 * 1024 * 1024  # of a watch; etcd refuses objects of more than 1.5 MiB
DEAD_SECONDS = 20
TCP_OPTIONS = {
    "TCP_KEEPIDLE": DEAD_SECONDS // 2,
    "TCP_KEEPINTVL": DEAD_SECONDS // 4,
    "TCP_KEEPCNT": 2,
    "TCP_USER_TIMEOUT": 1000 * DEAD_SECONDS,  # milliseconds; covers what was sent and never acknowledged, too
}


class NoAccess(Exception):
    """The API server cannot be reached with what was given; the message says what to change."""


@dataclass(frozen=True)
class Access:
    """An API server and the means to talk to it; its repr keeps the secrets."""

    server: str
    tls: ssl.SSLContext | None = field(default=None, repr=False)
    token: str | None = field(default=None, repr=False)
    token_file: Path | None = None
    namespace: str = "default"


def find_access(*, kubeconfig: str | None = None, context: str | None = None) -> Access:
    """The given kubeconfig, else the pod's service account, else $KUBECONFIG or ~/.kube/config."""
    if kubeconfig is None and context is None and "KUBERNETES_SERVICE_HOST" in os.environ:
        return load_service_account(SERVICE_ACCOUNT, os.environ)
    named = kubeconfig or os.environ.get("KUBECONFIG") or str(Path.home() / ".kube" / "config")
    return load_kubeconfig([Path(part) for part in named.split(os.pathsep) if part], context=context)


def load_service_account(folder: Path, environment: Mapping[str, str]) -> Access:
    """The token stays a file: the kubelet replaces it about once an hour."""
    host, port = environment["KUBERNETES_SERVICE_HOST"], environment.get("KUBERNETES_SERVICE_PORT", "443")
    if not (folder / "token").exists():
        raise NoAccess(f"{folder}/token: missing; give the operator's pod a service account with a mounted token")
    return Access(
        server=f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}",
        tls=ssl.create_default_context(cafile=str(folder / "ca.crt")),
        token_file=folder / "token",
        namespace=(folder / "namespace").read_text().strip(),
    )


def load_kubeconfig(files: Iterable[Path], *, context: str | None = None) -> Access:
    """Several files are read as kubectl does: the first that names a thing wins."""
    documents = [(path, _read_yaml(path)) for path in files if path.exists()]
    if not documents:
        raise NoAccess("no kubeconfig found; set --kubeconfig or KUBECONFIG, or run inside a cluster")
    current = context or next((d["current-context"] for _, d in documents if d.get("current-context")), None)
    if not current:
        raise NoAccess(f"{documents[0][0]}: current-context is not set; choose one with --context")
    chosen, _ = _named(documents, "contexts", current)
    cluster, cluster_home = _named(documents, "clusters", chosen["cluster"])
    user, user_home = _named(documents, "users", chosen["user"])
    for unsupported in ("exec", "auth-provider", "username"):
        if unsupported in user:
            raise NoAccess(
                f"kubeconfig user {chosen['user']!r} logs in by {unsupported}, which is not supported; "
                "use a token (kubectl create token) or a client certificate"
            )
    token_file = user_home / user["tokenFile"] if "tokenFile" in user else None
    return Access(
        server=cluster["server"],
        tls=_tls(cluster, cluster_home, user, user_home),
        token=user.get("token"),
        token_file=token_file,
        namespace=chosen.get("namespace", "default"),
    )


def _read_yaml(path: Path) -> dict[str, Any]:
    document = yaml.safe_load(path.read_text())
    if not isinstance(document, dict):
        raise NoAccess(f"{path}: not a kubeconfig")
    return document


def _named(documents: list[tuple[Path, dict[str, Any]]], section: str, name: str) -> tuple[dict[str, Any], Path]:
    for path, document in documents:
        for item in document.get(section) or ():
            if item["name"] == name:
                return item[section.removesuffix("s")] or {}, path.parent
    raise NoAccess(f"kubeconfig: {section} has no entry {name!r}; see kubectl config view")


def _tls(cluster: dict[str, Any], cluster_home: Path, user: dict[str, Any], user_home: Path) -> ssl.SSLContext | None:
    if cluster["server"].startswith("http://"):
        return None
    authority = cluster.get("certificate-authority-data")
    context = ssl.create_default_context(
        cafile=str(cluster_home / cluster["certificate-authority"]) if "certificate-authority" in cluster else None,
        cadata=base64.b64decode(authority).decode() if authority else None,
    )
    if cluster.get("insecure-skip-tls-verify"):
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    if "client-certificate" in user:
        context.load_cert_chain(user_home / user["client-certificate"], user_home / user["client-key"])
    elif "client-certificate-data" in user:
        with tempfile.NamedTemporaryFile() as pair:  # the ssl module takes certificates from files only
            pair.write(base64.b64decode(user["client-certificate-data"]) + b"\n")
            pair.write(base64.b64decode(user["client-key-data"]))
            pair.flush()
            context.load_cert_chain(pair.name)
    return context


class BearerToken:
    """Puts the token on every request; a token file is read again when it was replaced."""

    def __init__(self, access: Access) -> None:
        self._file = access.token_file
        self._token = access.token
        self._version: tuple[int, int] | None = None

    async def __call__(
        self, request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType
    ) -> aiohttp.ClientResponse:
        """Send the request with the token of this moment."""
        if token := self.current():
            request.headers["Authorization"] = f"Bearer {token}"
        return await handler(request)

    def current(self) -> str | None:
        """The token, if there is one; a client certificate needs none."""
        if self._file is not None:
            found = self._file.stat()
            version = (found.st_mtime_ns, found.st_ino)
            if version != self._version:
                self._token, self._version = self._file.read_text().strip(), version
        return self._token


def open_session(
    access: Access, *, connections: int, middlewares: tuple[aiohttp.ClientMiddlewareType, ...] = ()
) -> aiohttp.ClientSession:
    """A session that logs in by itself; `connections` 0 means without limit, for watches."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(
            limit=connections,
            ssl=access.tls if access.tls is not None else True,
            keepalive_timeout=75,
            socket_factory=open_socket,
        ),
        headers={"User-Agent": "finetune-operator", "Accept": "application/json"},
        middlewares=(*middlewares, BearerToken(access)),
        read_bufsize=LONGEST_LINE // 2,
    )


def open_socket(address: aiohttp.AddrInfoType) -> socket.socket:
    """A socket whose connection ends after DEAD_SECONDS without any sign of its peer.

    A load balancer or a lost machine that forgets a connection tells nobody: without this a watch stays silent until
    its next bookmark is overdue, and a call until its timeout.
    """
    family, kind, protocol, _, _ = address
    opened = socket.socket(family, kind, protocol)
    opened.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in TCP_OPTIONS.items():
        if hasattr(socket, name):  # macOS, where people develop, has not all of them
            opened.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return opened
