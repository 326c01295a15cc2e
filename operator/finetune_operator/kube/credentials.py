"""Loads the address and credentials of the API server from the pod's service account or a kubeconfig."""

import asyncio
import base64
import os
import socket
import ssl
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import aiohttp
import yaml
from yarl import URL

from finetune_operator.kube.exec_login import ExecLogin, LoginCredential, LoginFailed
from finetune_operator.kube.kubeconfig_fields import (
    CLUSTER_KEYS,
    USER_KEYS,
    UnusableKey,
    build_impersonation_headers,
    select_keys,
)

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
MAX_LINE_BYTES = 8 * 1024 * 1024  # maximum length of a line in a watch stream; etcd rejects objects above 1.5 MiB
DEAD_PEER_TIMEOUT_SECONDS = 20
TCP_OPTIONS = {
    "TCP_KEEPIDLE": DEAD_PEER_TIMEOUT_SECONDS // 2,
    "TCP_KEEPINTVL": DEAD_PEER_TIMEOUT_SECONDS // 4,
    "TCP_KEEPCNT": 2,
    "TCP_USER_TIMEOUT": 1000 * DEAD_PEER_TIMEOUT_SECONDS,  # timeout for unacknowledged data, in milliseconds
}


class NoClusterAccess(Exception):
    """Raised if credentials are missing or unusable; the message explains how to fix them."""


@dataclass(frozen=True)
class ClusterCredentials:
    """Address and credentials of an API server; the repr omits the secrets."""

    server: str
    tls: ssl.SSLContext | None = field(default=None, repr=False)
    token: str | None = field(default=None, repr=False)
    token_file: Path | None = None
    login: ExecLogin | None = None
    credential: LoginCredential | None = None  # first result of `login`
    impersonation: tuple[tuple[str, str], ...] = ()  # names and values of headers
    namespace: str = "default"

    def is_server_of(self, url: URL) -> bool:
        """Return whether a URL has scheme, host and port of the server, to which alone the credentials are sent."""
        server = URL(self.server)
        return (url.scheme, url.host, url.port) == (server.scheme, server.host, server.port)


def find_credentials(*, kubeconfig: str | None = None, context: str | None = None) -> ClusterCredentials:
    """Load the given kubeconfig, the pod's service account, or $KUBECONFIG or ~/.kube/config, in this order.

    Raises:
        NoClusterAccess: No usable credentials were found.
    """
    if kubeconfig is None and context is None and "KUBERNETES_SERVICE_HOST" in os.environ:
        return load_service_account(SERVICE_ACCOUNT, os.environ)
    paths = kubeconfig or os.environ.get("KUBECONFIG") or str(Path.home() / ".kube" / "config")
    return load_kubeconfig([Path(path) for path in paths.split(os.pathsep) if path], context=context)


def load_service_account(folder: Path, environment: Mapping[str, str]) -> ClusterCredentials:
    """Load the mounted service account; the token is read later, because the kubelet rotates it about hourly."""
    host, port = environment["KUBERNETES_SERVICE_HOST"], environment.get("KUBERNETES_SERVICE_PORT", "443")
    if not (folder / "token").exists():
        raise NoClusterAccess(
            f"{folder}/token: missing; give the operator's pod a service account with a mounted token"
        )
    return ClusterCredentials(
        server=f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}",
        tls=ssl.create_default_context(cafile=str(folder / "ca.crt")),
        token_file=folder / "token",
        namespace=(folder / "namespace").read_text().strip(),
    )


def load_kubeconfig(files: Iterable[Path], *, context: str | None = None) -> ClusterCredentials:
    """Load kubeconfig files and merge them as kubectl does: the first file with an entry takes precedence."""
    documents = [(path, _read_yaml(path)) for path in files if path.exists()]
    if not documents:
        raise NoClusterAccess("no kubeconfig found; set --kubeconfig or KUBECONFIG, or run inside a cluster")
    current_contexts = (document.get("current-context") for _, document in documents)
    context_name = context or next((name for name in current_contexts if name), None)
    if not context_name:
        raise NoClusterAccess(f"{documents[0][0]}: current-context is not set; choose one with --context")
    context_entry, _ = _find_entry(documents, "contexts", context_name)
    cluster, cluster_folder = _find_entry(documents, "clusters", context_entry["cluster"])
    user, user_folder = _find_entry(documents, "users", context_entry["user"])
    with _name_entry("cluster", context_entry["cluster"]):
        cluster = select_keys(cluster, CLUSTER_KEYS)
        _check_server(cluster)
    with _name_entry("user", context_entry["user"]):
        user = select_keys(user, USER_KEYS)
        impersonation = build_impersonation_headers(user)
        login, credential = _log_in(user, user_folder, cluster)
    tls = _build_tls_context(cluster, cluster_folder)
    if tls is not None:
        _load_client_certificate(tls, user, user_folder, credential)
    return ClusterCredentials(
        server=cluster["server"],
        tls=tls,
        token=user.get("token"),
        token_file=user_folder / user["tokenFile"] if "tokenFile" in user else None,
        login=login,
        credential=credential,
        impersonation=impersonation,
        namespace=context_entry.get("namespace") or "default",
    )


@contextmanager
def _name_entry(kind: str, name: str) -> Iterator[None]:
    """Turn errors about an entry of the kubeconfig into NoClusterAccess with its kind and name."""
    try:
        yield
    except UnusableKey as error:
        raise NoClusterAccess(f"kubeconfig {kind} {name!r} {error}") from error
    except LoginFailed as error:
        raise NoClusterAccess(f"kubeconfig {kind} {name!r}: {error}") from error


def _check_server(cluster: dict[str, Any]) -> None:
    """Raise UnusableKey unless the server is a URL of http or https with a host."""
    server = cluster.get("server")
    url = URL(server) if isinstance(server, str) else URL()
    if url.scheme not in ("http", "https") or not url.host:
        raise UnusableKey(f"has the server {server!r}; expected a URL such as https://10.0.0.1:6443")


def _log_in(
    user: dict[str, Any], folder: Path, cluster: dict[str, Any]
) -> tuple[ExecLogin | None, LoginCredential | None]:
    """Run the login plugin of a user, if there is one."""
    if "exec" not in user:
        return None, None
    login = ExecLogin.parse(user["exec"], folder, cluster)
    return login, login.run()


def _read_yaml(path: Path) -> dict[str, Any]:
    document = yaml.safe_load(path.read_text())
    if not isinstance(document, dict):
        raise NoClusterAccess(f"{path}: not a kubeconfig")
    return document


def _find_entry(documents: list[tuple[Path, dict[str, Any]]], section: str, name: str) -> tuple[dict[str, Any], Path]:
    for path, document in documents:
        for item in document.get(section) or ():
            if item["name"] == name:
                return item[section.removesuffix("s")] or {}, path.parent
    raise NoClusterAccess(f"kubeconfig: {section} has no entry {name!r}; see kubectl config view")


def _build_tls_context(cluster: dict[str, Any], cluster_folder: Path) -> ssl.SSLContext | None:
    if cluster["server"].startswith("http://"):
        return None
    authority_data = cluster.get("certificate-authority-data")
    context = ssl.create_default_context(
        cafile=str(cluster_folder / cluster["certificate-authority"]) if "certificate-authority" in cluster else None,
        cadata=base64.b64decode(authority_data).decode() if authority_data else None,
    )
    if cluster.get("insecure-skip-tls-verify"):
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context


def _load_client_certificate(
    context: ssl.SSLContext, user: dict[str, Any], user_folder: Path, credential: LoginCredential | None
) -> None:
    if "client-certificate" in user:
        context.load_cert_chain(user_folder / user["client-certificate"], user_folder / user["client-key"])
        return
    if "client-certificate-data" in user:
        pair = base64.b64decode(user["client-certificate-data"]) + b"\n" + base64.b64decode(user["client-key-data"])
    elif credential is not None and credential.certificate:
        pair = f"{credential.certificate}\n{credential.key}".encode()
    else:
        return
    with tempfile.NamedTemporaryFile() as key_pair:  # the ssl module reads certificates only from files
        key_pair.write(pair)
        key_pair.flush()
        context.load_cert_chain(key_pair.name)


class RedirectRefused(aiohttp.ClientResponseError):
    """Raised for a response that redirects the request; `status` is its HTTP status."""


class ServerOnly:
    """Client middleware that sends requests to the API server only, and follows no redirect.

    A pod that is reached by the proxy of the API server chooses the redirects in its responses. Without this limit,
    it would receive the client certificate, the headers and, by the next middleware, the token of the user.
    """

    def __init__(self, credentials: ClusterCredentials) -> None:
        self._credentials = credentials

    async def __call__(
        self, request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType
    ) -> aiohttp.ClientResponse:
        """Send the request as the impersonated user.

        Raises:
            aiohttp.ClientError: The URL is not one of the API server, and nothing was sent.
            RedirectRefused: The response is a redirect.
        """
        if not self._credentials.is_server_of(request.url):
            raise aiohttp.ClientError(f"{request.url.origin()} is not the API server {self._credentials.server}")
        for name, value in self._credentials.impersonation:
            request.headers.add(name, value)
        response = await handler(request)
        if 300 <= response.status < 400:
            response.close()
            message = "the answer is a redirect, which is not followed"
            raise RedirectRefused(response.request_info, (), status=response.status, message=message)
        return response


class BearerToken:
    """Client middleware that adds the token to every request to the API server and renews it.

    A token file is read again after a rotation. A login plugin runs again when its token is about to expire, and after
    a response with status 401.
    """

    def __init__(self, credentials: ClusterCredentials) -> None:
        self._is_server_of = credentials.is_server_of
        self._file = credentials.token_file
        self._token = credentials.token
        self._version: tuple[int, int] | None = None
        self._login = credentials.login
        self._credential = credentials.credential
        self._renewal = asyncio.Lock()

    async def __call__(
        self, request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType
    ) -> aiohttp.ClientResponse:
        """Send the request with the current token, or to another server without it."""
        if not self._is_server_of(request.url):
            return await handler(request)
        if self._login is None:
            _set_token(request, self.get_token())
            return await handler(request)
        token = await self._get_login_token(rejected=None)
        _set_token(request, token)
        response = await handler(request)
        if response.status == 401:
            response.release()
            _set_token(request, await self._get_login_token(rejected=token))
            response = await handler(request)
        return response

    def get_token(self) -> str | None:
        """Return the configured token or the content of the token file; None if neither is configured."""
        if self._file is not None:
            file_status = self._file.stat()
            version = (file_status.st_mtime_ns, file_status.st_ino)
            if version != self._version:
                self._token, self._version = self._file.read_text().strip(), version
        return self._token

    async def _get_login_token(self, *, rejected: str | None) -> str | None:
        """Return the token of the plugin, which runs again if it is expired or was rejected by the API server."""
        assert self._login is not None
        async with self._renewal:
            credential = self._credential
            is_rejected = rejected is not None and credential is not None and credential.token == rejected
            if credential is None or is_rejected or credential.is_expired(datetime.now(UTC)):
                try:
                    credential = self._credential = await asyncio.to_thread(self._login.run)
                except LoginFailed as error:
                    raise aiohttp.ClientError(str(error)) from error
            return credential.token


def _set_token(request: aiohttp.ClientRequest, token: str | None) -> None:
    if token:
        request.headers["Authorization"] = f"Bearer {token}"


def open_session(
    credentials: ClusterCredentials, *, connections: int, middlewares: tuple[aiohttp.ClientMiddlewareType, ...] = ()
) -> aiohttp.ClientSession:
    """Open an HTTP session with these credentials and a connection limit; 0 means no limit."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(
            limit=connections,
            ssl=credentials.tls if credentials.tls is not None else True,
            keepalive_timeout=75,
            socket_factory=open_socket,
        ),
        cookie_jar=aiohttp.DummyCookieJar(),  # a pod behind the proxy of the API server would set cookies for it
        headers={"User-Agent": "finetune-operator", "Accept": "application/json"},
        middlewares=(*middlewares, ServerOnly(credentials), BearerToken(credentials)),
        read_bufsize=MAX_LINE_BYTES // 2,
    )


def open_socket(address: aiohttp.AddrInfoType) -> socket.socket:
    """Create a socket that closes its connection after DEAD_PEER_TIMEOUT_SECONDS without a packet from the peer.

    A load balancer or a lost host may drop a connection silently. Without TCP keepalive, a watch would detect this only
    when its next bookmark is overdue, and other requests only at their timeout (decisions/115).
    """
    family, kind, protocol, _, _ = address
    connection = socket.socket(family, kind, protocol)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in TCP_OPTIONS.items():
        if hasattr(socket, name):  # macOS lacks some of these options
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return connection
