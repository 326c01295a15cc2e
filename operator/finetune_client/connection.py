"""Requests to the API server with the credentials of a user, whose errors name the object."""

import asyncio
import json
import urllib.parse
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass
from typing import Self

import aiohttp

from finetune_client.dns_label import check_dns_label
from finetune_client.errors import ClientError
from finetune_operator.kube.api_client import NO_RESPONSE, ApiClient, ApiError, parse_error
from finetune_operator.kube.api_paths import ApiPath
from finetune_operator.kube.credentials import (
    ClusterCredentials,
    NoClusterAccess,
    RedirectRefused,
    find_credentials,
    open_session,
)
from finetune_operator.observation.ownership import RawBody

FIELD_MANAGER = "finetune"
APPLY = "application/apply-patch+yaml"
MERGE_PATCH = "application/merge-patch+json"
MAX_LINE_BYTES = 256 * 1024  # a longer log line is truncated


@dataclass(frozen=True)
class ClusterTarget:
    """What selects the cluster and the namespace; None means the default of kubectl."""

    namespace: str | None = None
    context: str | None = None
    kubeconfig: str | None = None


class ClusterConnection:
    """Sends requests to the API server of a cluster; an asynchronous context manager."""

    def __init__(self, target: ClusterTarget) -> None:
        self._target = target
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        try:
            credentials = await asyncio.to_thread(
                find_credentials, kubeconfig=self._target.kubeconfig, context=self._target.context
            )
        except (NoClusterAccess, OSError, ValueError, KeyError, TypeError) as error:
            raise ClientError(f"no access to a cluster: {error}") from error
        self.namespace = self._target.namespace or credentials.namespace
        check_dns_label(self.namespace, what="namespace")
        self.credentials: ClusterCredentials = credentials
        self._session = await self._stack.enter_async_context(open_session(credentials, connections=0))
        self._api = ApiClient(credentials.server, request_session=self._session, watch_session=self._session)
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._stack.aclose()

    async def get(self, path: ApiPath, *, what: str, params: Mapping[str, str] | None = None) -> RawBody:
        """Return an object or a list. `what` names the object in errors."""
        with _translate_errors(what):
            return await self._api.call("GET", path, params=params)

    async def list_items(self, path: ApiPath, *, what: str, selector: str = "") -> list[RawBody]:
        """Return all items of a collection."""
        with _translate_errors(what):
            return [item async for page in self._api.list_pages(path, selector=selector) for item in page["items"]]

    async def apply(self, path: ApiPath, body: RawBody, *, what: str, dry_run: bool = False) -> RawBody:
        """Create an object, or change the fields of the body, by server-side apply."""
        params = {
            "fieldManager": FIELD_MANAGER,
            "fieldValidation": "Strict",
            "force": "true",  # the user submits the whole job
            **({"dryRun": "All"} if dry_run else {}),
        }
        with _translate_errors(what):
            return await self._api.call("PATCH", path, body=body, params=params, content_type=APPLY)

    async def create(self, path: ApiPath, body: RawBody, *, what: str) -> RawBody:
        """Create an object and return it."""
        with _translate_errors(what):
            return await self._api.call(
                "POST", path, body=body, params={"fieldManager": FIELD_MANAGER}, idempotent=False
            )

    async def patch(self, path: ApiPath, body: RawBody, *, what: str) -> RawBody:
        """Change the fields of a JSON merge patch."""
        with _translate_errors(what):
            params = {"fieldManager": FIELD_MANAGER}
            return await self._api.call("PATCH", path, body=body, params=params, content_type=MERGE_PATCH)

    async def delete(
        self, path: ApiPath, *, what: str, grace_seconds: int | None = None, uid: str | None = None
    ) -> None:
        """Delete an object, only if it has this uid, and then its dependents."""
        options: RawBody = {"propagationPolicy": "Background"}
        if uid is not None:
            options["preconditions"] = {"uid": uid}
        if grace_seconds is not None:
            options["gracePeriodSeconds"] = grace_seconds
        with _translate_errors(what):
            await self._api.call("DELETE", path, body=options)

    async def stream_lines(self, path: ApiPath, *, what: str, params: Mapping[str, str]) -> AsyncGenerator[bytes, None]:
        """Yield the lines of a response, such as a pod's log, as they arrive."""
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=5)
        with _translate_errors(what):
            url = self.credentials.server.rstrip("/") + path
            async with self._session.get(url, params=params, timeout=timeout) as response:
                if response.status >= 400:
                    raise parse_error(response.status, await response.read(), response.headers)
                async for line in _split_lines(response.content):
                    yield line

    async def open_websocket(
        self, path: ApiPath, *, what: str, params: list[tuple[str, str]], protocol: str
    ) -> aiohttp.ClientWebSocketResponse:
        """Open a WebSocket, as the exec subresource of a pod needs it."""
        url = f"{self.credentials.server.rstrip('/')}{path}?{urllib.parse.urlencode(params)}"
        with _translate_errors(what):
            return await self._session.ws_connect(
                url,
                protocols=(protocol,),
                max_msg_size=0,
                headers={"Accept": "*/*"},  # the API server has no JSON for a stream and would respond with 406
            )


async def _split_lines(stream: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """Yield the lines of a stream without the newline; a line is truncated at MAX_LINE_BYTES."""
    line = bytearray()
    async for chunk in stream.iter_any():
        first, *rest = chunk.split(b"\n")
        line += first[: MAX_LINE_BYTES - len(line)]
        for part in rest:
            yield bytes(line)
            line = bytearray(part[:MAX_LINE_BYTES])
    if line:
        yield bytes(line)


@contextmanager
def _translate_errors(what: str) -> Iterator[None]:
    try:
        yield
    except ApiError as error:
        status = None if error.status == NO_RESPONSE else error.status
        raise ClientError(f"{what}: {error.message}", status=status) from error
    except (aiohttp.WSServerHandshakeError, RedirectRefused) as error:
        raise ClientError(f"{what}: {error.message} (HTTP {error.status})", status=error.status) from error
    except (aiohttp.ClientError, TimeoutError, OSError, json.JSONDecodeError) as error:
        raise ClientError(f"{what}: no answer from the API server: {error or type(error).__name__}") from error
