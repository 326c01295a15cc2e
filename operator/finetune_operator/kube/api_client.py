"""One HTTP call to the API server: timeouts, a few quick retries, and errors in its own words."""

import asyncio
import json
import random
from collections.abc import AsyncIterator, Mapping
from typing import Any

import aiohttp

Raw = dict[str, Any]

PAUSES = (0.1, 0.5)  # before the second and the third try; what lasts longer is the work queue's business
LONGEST_WAIT = 2.0  # seconds of a Retry-After that are sat out here
PAGE = 500
TIMEOUT = aiohttp.ClientTimeout(total=30, sock_connect=5)
SILENCE = 90.0  # seconds without a line, when a bookmark is due every 60
NO_ANSWER = 0


class ApiError(Exception):
    """The API server said no, or nothing: then `status` is NO_ANSWER."""

    def __init__(self, message: str, *, status: int, reason: str = "", retry_after: float | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.reason = reason
        self.retry_after = retry_after


class ApiServer:
    """Dict in, dict out. Calls share a bounded pool of connections; streams have one each."""

    def __init__(self, server: str, *, calls: aiohttp.ClientSession, streams: aiohttp.ClientSession) -> None:
        self._server = server.rstrip("/")
        self._calls = calls
        self._streams = streams

    async def call(
        self,
        method: str,
        path: str,
        *,
        body: Raw | None = None,
        params: Mapping[str, str] | None = None,
        repeatable: bool = True,
    ) -> Raw:
        """One answer, after up to three tries; `repeatable` is false where a lost answer must not be asked again."""
        for pause in PAUSES:
            try:
                return await self.call_once(method, path, body=body, params=params)
            except ApiError as error:
                if not _worth_repeating(error, repeatable=repeatable):
                    raise
                await asyncio.sleep(max(error.retry_after or 0.0, pause * random.uniform(0.5, 1.0)))  # noqa: S311
        return await self.call_once(method, path, body=body, params=params)

    async def call_once(
        self, method: str, path: str, *, body: Raw | None = None, params: Mapping[str, str] | None = None
    ) -> Raw:
        """One answer to one request."""
        content = None if body is None else json.dumps(body, allow_nan=False, separators=(",", ":")).encode()
        headers = {"Content-Type": "application/json"} if content else None
        try:
            async with self._calls.request(
                method, self._server + path, data=content, params=params, headers=headers, timeout=TIMEOUT
            ) as response:
                answer = await response.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise _no_answer(method, path, error) from error
        if response.status >= 400:
            raise parse_error(response.status, answer, response.headers)
        parsed: Raw = json.loads(answer)
        return parsed

    async def pages(self, path: str, *, selector: str = "") -> AsyncIterator[Raw]:
        """A list in pages. Read consistently: resourceVersion=0 could answer from before what we have seen."""
        params = {"limit": str(PAGE), **({"labelSelector": selector} if selector else {})}
        while True:
            page = await self.call("GET", path, params=params)
            yield page
            if not (token := page["metadata"].get("continue")):
                return
            params["continue"] = token

    async def watch(self, path: str, *, selector: str, version: str) -> AsyncIterator[Raw]:
        """Events after `version`, until the server ends the stream; silence beyond the due bookmark is an error."""
        params = {
            "watch": "1",
            "allowWatchBookmarks": "true",
            "resourceVersion": version,
            "timeoutSeconds": str(random.randint(240, 360)),  # noqa: S311  spread the reconnects
            **({"labelSelector": selector} if selector else {}),
        }
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=5, sock_read=SILENCE)
        try:
            async with self._streams.get(self._server + path, params=params, timeout=timeout) as response:
                if response.status >= 400:
                    raise parse_error(response.status, await response.read(), response.headers)
                async for line in response.content:
                    yield json.loads(line)
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:  # ValueError: a line cut short
            raise _no_answer("WATCH", path, error) from error


def parse_error(status: int, answer: bytes, headers: Mapping[str, str]) -> ApiError:
    """The error that an answer stands for; proxies answer without the API server's Status object."""
    try:
        parsed = json.loads(answer)
    except ValueError:
        parsed = None
    said: Raw = parsed if isinstance(parsed, dict) and parsed.get("kind") == "Status" else {}
    details = said.get("details") or {}
    return ApiError(
        said.get("message") or f"the API server answered HTTP {status}",
        status=status,
        reason=said.get("reason") or "",
        retry_after=_seconds(headers.get("Retry-After"), details.get("retryAfterSeconds")),
    )


def _seconds(*candidates: object) -> float | None:
    for candidate in candidates:
        try:
            return max(0.0, float(str(candidate)))
        except ValueError:
            continue
    return None


def _no_answer(method: str, path: str, error: Exception) -> ApiError:
    what = str(error) or type(error).__name__
    return ApiError(f"{method} {path}: no answer from the API server: {what}", status=NO_ANSWER)


def _worth_repeating(error: ApiError, *, repeatable: bool) -> bool:
    if (error.retry_after or 0.0) > LONGEST_WAIT:
        return False
    if error.status == 429:  # turned away before anything was done
        return True
    return repeatable and (error.status == NO_ANSWER or error.status >= 500)
