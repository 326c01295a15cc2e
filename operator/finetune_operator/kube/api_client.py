"""HTTP client for the API server, with timeouts, quick retries and errors that contain the server's message."""

import asyncio
import json
import random
from collections.abc import AsyncIterator, Mapping

import aiohttp

from finetune_operator.kube.api_paths import ApiPath
from finetune_operator.kube.credentials import RedirectRefused
from finetune_operator.kube.missing_rights import MissingRights
from finetune_operator.observation.ownership import RawBody
from finetune_operator.tasks.fair_slots import FairSlots
from finetune_supervisor.contract import parse_json

RETRY_DELAYS_SECONDS = (0.1, 0.5)  # delays before the two retries; the work queue handles longer outages
MAX_RETRY_AFTER_SECONDS = 2.0  # the work queue handles a longer Retry-After
PAGE_SIZE = 500
# An object in etcd has at most 1.5 MB. Larger responses would fill the memory of the operator.
MAX_OBJECT_BYTES = 4 * 1024**2
MAX_PAGE_BYTES = 8 * 1024**2
SMALLER_PAGE_DIVISOR = 5  # of the page size, after a page with too many bytes
# Each TLS connection needs a buffer of 256 KiB, and the API server would queue more concurrent requests anyway.
MAX_CREATES = 32  # concurrent POST requests, which admission webhooks of one namespace may delay for long
MAX_OTHER_REQUESTS = 32
REQUEST_TIMEOUT = aiohttp.ClientTimeout(total=30, sock_connect=5)
READ_TIMEOUT = aiohttp.ClientTimeout(total=5, sock_connect=5)  # of a GET of one object
WATCH_READ_TIMEOUT_SECONDS = 90.0  # the API server sends a bookmark every 60 seconds
NO_RESPONSE = 0
JSON = "application/json"


class ApiError(Exception):
    """Error response of the API server; `status` is NO_RESPONSE if no response was received."""

    def __init__(self, message: str, *, status: int, reason: str = "", retry_after: float | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.reason = reason
        self.retry_after = retry_after


class ResponseTooLarge(ApiError):
    """The response has more bytes than the request permits."""


class ApiClient:
    """JSON client for the API server, with separate limits of concurrent creates and of other requests.

    request_session: a session without a limit of connections, because the timeout of aiohttp includes the wait for a
    free connection. The limits of this class are applied before the timeout of a request begins.
    """

    def __init__(
        self, server: str, *, request_session: aiohttp.ClientSession, watch_session: aiohttp.ClientSession
    ) -> None:
        self._server = server.rstrip("/")
        self._request_session = request_session
        self._watch_session = watch_session
        self._create_slots = FairSlots(MAX_CREATES)
        self._other_slots = FairSlots(MAX_OTHER_REQUESTS)
        self.missing_rights = MissingRights()

    async def call(
        self,
        method: str,
        path: ApiPath,
        *,
        body: RawBody | None = None,
        params: Mapping[str, str] | None = None,
        idempotent: bool = True,
        content_type: str = JSON,
    ) -> RawBody:
        """Send a request, with up to two retries.

        idempotent: False if the request must not be retried after it may have taken effect.
        content_type: media type of the body; a PATCH needs that of its kind.

        Raises:
            ApiError: The last retry failed, or the error is not retryable.
        """
        for delay in RETRY_DELAYS_SECONDS:
            try:
                return await self.call_once(method, path, body=body, params=params, content_type=content_type)
            except ApiError as error:
                if not _should_retry(error, idempotent=idempotent):
                    raise
                await asyncio.sleep(max(error.retry_after or 0.0, delay * random.uniform(0.5, 1.0)))  # noqa: S311
        return await self.call_once(method, path, body=body, params=params, content_type=content_type)

    async def call_once(
        self,
        method: str,
        path: ApiPath,
        *,
        body: RawBody | None = None,
        params: Mapping[str, str] | None = None,
        content_type: str = JSON,
    ) -> RawBody:
        """Send a request without retries. A GET without parameters reads one object.

        Raises:
            ApiError: The API server returned an error or did not respond.
            ResponseTooLarge: An object has more than MAX_OBJECT_BYTES, or a page more than MAX_PAGE_BYTES.
        """
        request_content = None if body is None else encode_json(body)
        headers = {"Content-Type": content_type} if request_content else None
        slots = self._create_slots if method == "POST" else self._other_slots
        is_page = "limit" in (params or ())
        try:
            async with (
                slots.hold(get_namespace(path)),
                self._request_session.request(
                    method,
                    self._server + path,
                    data=request_content,
                    params=params,
                    headers=headers,
                    timeout=READ_TIMEOUT if method == "GET" and not is_page else REQUEST_TIMEOUT,
                ) as response,
            ):
                content = await _read(response, MAX_PAGE_BYTES if is_page else MAX_OBJECT_BYTES)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise _build_connection_error(method, path, error) from error
        if content is None:
            raise ResponseTooLarge(f"{method} {path}: the response is too large", status=NO_RESPONSE)
        if response.status >= 400:
            refusal = parse_error(response.status, content, response.headers)
            self.missing_rights.record(method, path, status=refusal.status, message=refusal.message)
            raise refusal
        self.missing_rights.record(method, path, status=response.status)
        parsed: RawBody = parse_json(content)
        return parsed

    async def list_pages(
        self, path: ApiPath, *, selector: str = "", page_size: int = PAGE_SIZE
    ) -> AsyncIterator[RawBody]:
        """Yield the pages of a consistent LIST; a page with too many bytes is read again as several smaller ones.

        resourceVersion=0 is not used, because such a response may be older than an earlier one.
        """
        params = {"limit": str(page_size), **({"labelSelector": selector} if selector else {})}
        while True:
            try:
                page = await self.call("GET", path, params=params)
            except ResponseTooLarge:
                if page_size == 1:
                    raise
                page_size = max(1, page_size // SMALLER_PAGE_DIVISOR)
                params["limit"] = str(page_size)
                continue
            yield page
            if not (token := page["metadata"].get("continue")):
                return
            params["continue"] = token

    async def watch(self, path: ApiPath, *, selector: str, version: str) -> AsyncIterator[RawBody]:
        """Yield the watch events after this resource version, until the server ends the stream.

        Raises:
            ApiError: The stream broke, or neither an event nor a bookmark arrived in time.
        """
        params = {
            "watch": "1",
            "allowWatchBookmarks": "true",
            "resourceVersion": version,
            "timeoutSeconds": str(random.randint(240, 360)),  # noqa: S311  spread the reconnects
            **({"labelSelector": selector} if selector else {}),
        }
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=5, sock_read=WATCH_READ_TIMEOUT_SECONDS)
        try:
            async with self._watch_session.get(self._server + path, params=params, timeout=timeout) as response:
                if response.status >= 400:
                    refusal = parse_error(response.status, await response.read(), response.headers)
                    self.missing_rights.record("WATCH", path, status=refusal.status, message=refusal.message)
                    raise refusal
                self.missing_rights.record("WATCH", path, status=response.status)
                async for line in response.content:
                    yield parse_json(line)
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:  # ValueError if a line is truncated
            raise _build_connection_error("WATCH", path, error) from error


def get_namespace(path: str) -> str:
    """Return the namespace in a path of the API; empty if it has none."""
    _, separator, rest = path.partition("/namespaces/")
    return rest.split("/", 1)[0] if separator else ""


async def _read(response: aiohttp.ClientResponse, max_bytes: int) -> bytes | None:
    """Return the content of a response; None if it has more bytes than permitted."""
    chunks, size = [], 0
    async for chunk in response.content.iter_any():
        size += len(chunk)
        if size > max_bytes:
            return None
        chunks.append(chunk)
    return b"".join(chunks)


def encode_json(body: RawBody) -> bytes:
    """Encode as UTF-8, because escape sequences would double the size of most texts that are not in ASCII."""
    text = json.dumps(body, allow_nan=False, ensure_ascii=False, separators=(",", ":"))
    return text.encode(errors="replace")  # a lone surrogate cannot be encoded


def parse_error(status: int, content: bytes, headers: Mapping[str, str]) -> ApiError:
    """Build the exception for an error response, which contains no Status object if a proxy sent it."""
    try:
        parsed = parse_json(content)
    except ValueError:
        parsed = None
    body: RawBody = parsed if isinstance(parsed, dict) and parsed.get("kind") == "Status" else {}
    details = body.get("details") or {}
    return ApiError(
        body.get("message") or f"the API server answered HTTP {status}",
        status=status,
        reason=body.get("reason") or "",
        retry_after=_parse_first_number(headers.get("Retry-After"), details.get("retryAfterSeconds")),
    )


def _parse_first_number(*candidates: object) -> float | None:
    for candidate in candidates:
        try:
            return max(0.0, float(str(candidate)))
        except ValueError:
            continue
    return None


def _build_connection_error(method: str, path: str, error: Exception) -> ApiError:
    if isinstance(error, RedirectRefused):  # not retried, because it is a response
        return ApiError(f"{method} {path}: {error.message} (HTTP {error.status})", status=error.status)
    cause = str(error) or type(error).__name__
    return ApiError(f"{method} {path}: no answer from the API server: {cause}", status=NO_RESPONSE)


def _should_retry(error: ApiError, *, idempotent: bool) -> bool:
    if isinstance(error, ResponseTooLarge):
        return False
    if (error.retry_after or 0.0) > MAX_RETRY_AFTER_SECONDS:
        return False
    if error.status == 429:  # the request was rejected before it took effect
        return True
    return idempotent and (error.status == NO_RESPONSE or error.status >= 500)
