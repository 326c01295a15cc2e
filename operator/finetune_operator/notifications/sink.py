"""Sends events to the sink, the HTTP endpoint that the administrator configured."""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum, auto
from pathlib import Path

import aiohttp
from yarl import URL

from finetune_operator.notifications.cloud_event import CONTENT_TYPE, sign_event

DEFAULT_SOURCE = "/finetune-operator"
TOKEN_FILE, SIGNING_KEY_FILE, URL_FILE = "token", "signing-key", "url"
REQUEST_TIMEOUT = aiohttp.ClientTimeout(total=10)
# The sink would reject the event again; other statuses may change, such as 403 after the rotation of a token.
PERMANENT_STATUSES = frozenset({400, 405, 409, 410, 413, 414, 415, 422})
TEMPORARY_STATUSES = frozenset({408, 425, 429})
_MAX_SECRET_BYTES = 8192


class InvalidSink(ValueError):
    """The URL of the sink cannot be used; the message explains why, without the URL."""


@dataclass(frozen=True)
class SinkConfig:
    """Where and how to send events."""

    url: URL | None  # None: the file `url` in the folder of the secrets
    source: str = DEFAULT_SOURCE  # the attribute `source` of the events
    secrets: Path | None = None  # folder with the files token, signing-key and url, each optional


class SendResult(StrEnum):
    """Result of one request: delivered, rejected permanently, or to be repeated.

    REFUSED is perhaps the answer to this event alone, such as 404 for one tenant, and perhaps to all.
    """

    DELIVERED = auto()
    REJECTED = auto()
    REFUSED = auto()
    UNAVAILABLE = auto()


def parse_sink_url(text: str) -> URL:
    """Parse the URL of a sink. Raises InvalidSink."""
    try:
        url = URL(text)
    except ValueError as error:
        raise InvalidSink("the URL cannot be parsed; use https://host/path") from error
    if url.scheme not in ("http", "https") or not url.host:
        raise InvalidSink("the URL must begin with http:// or https:// and contain a host")
    if url.user or url.password or url.fragment:
        raise InvalidSink(f"the URL must contain neither user name, password nor #; use the file {TOKEN_FILE}")
    return url


class HttpSink:
    """Sends single events with an own session, so that no cookie and no redirect leaves the configured URL."""

    def __init__(self, config: SinkConfig, *, now: Callable[[], datetime]) -> None:
        self._config = config
        self._now = now
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> "HttpSink":
        self._session = aiohttp.ClientSession(timeout=REQUEST_TIMEOUT, cookie_jar=aiohttp.DummyCookieJar())
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._session is not None:
            await self._session.close()

    async def send(self, event_id: str, body: bytes) -> tuple[SendResult, str]:
        """Send the event once; return the result and a description of the problem, without URL and secrets."""
        assert self._session is not None, "used outside of the context"
        try:
            url, headers = self._config.url or self._read_url(), self._build_headers(event_id, body)
            async with self._session.post(url, data=body, headers=headers, allow_redirects=False) as response:
                return _judge_status(response.status)
        except TimeoutError:
            return SendResult.UNAVAILABLE, f"no response within {REQUEST_TIMEOUT.total:.0f} s"
        except (aiohttp.ClientError, OSError) as error:  # their texts contain the URL
            return SendResult.UNAVAILABLE, type(error).__name__
        except ValueError as error:
            return SendResult.UNAVAILABLE, str(error)

    def _build_headers(self, event_id: str, body: bytes) -> dict[str, str]:
        """Return the headers with the current content of the Secret, which may be rotated."""
        headers = {"Content-Type": CONTENT_TYPE}
        if token := self._read_secret(TOKEN_FILE):
            headers["Authorization"] = f"Bearer {_decode_token(token)}"
        if key := self._read_secret(SIGNING_KEY_FILE):
            headers |= sign_event(event_id, body, key=key, now=self._now())
        return headers

    def _read_url(self) -> URL:
        """Return the URL in the Secret, which may be rotated. Raises: InvalidSink"""
        return parse_sink_url(self._read_secret(URL_FILE).decode(errors="replace"))

    def _read_secret(self, name: str) -> bytes:
        if self._config.secrets is None or not (path := self._config.secrets / name).exists():
            return b""
        with path.open("rb") as file:
            return file.read(_MAX_SECRET_BYTES).strip()


def _decode_token(token: bytes) -> str:
    """Return the token as text. Raises ValueError without the token, which a header error would contain."""
    if not token.isascii() or not (text := token.decode()).isprintable():
        raise ValueError(f"the file {TOKEN_FILE} contains characters that a header cannot contain")
    return text


def _judge_status(status: int) -> tuple[SendResult, str]:
    if 200 <= status < 300:
        return SendResult.DELIVERED, ""
    is_refused = 400 <= status < 500 and status not in TEMPORARY_STATUSES
    result = SendResult.REFUSED if is_refused else SendResult.UNAVAILABLE
    return SendResult.REJECTED if status in PERMANENT_STATUSES else result, f"HTTP status {status}"
