"""Requests of a soak test, which are repeated while the API server is unavailable, as after a change of the CRD."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from benchmarks.load.job_bodies import RawBody
from finetune_operator.kube.api_client import NO_RESPONSE, ApiClient, ApiError
from finetune_operator.kube.api_paths import ApiPath, extend_path

UNAVAILABLE_TIMEOUT_SECONDS = 60.0
RETRY_INTERVAL_SECONDS = 1.0
NOT_FOUND = 404
CONFLICT = 409
TOO_MANY_REQUESTS = 429


async def call(api: ApiClient, method: str, path: ApiPath, *, body: RawBody | None = None) -> RawBody:
    """Send a request; repeat it for a minute while the API server is unavailable. Raises ApiError."""
    deadline = time.monotonic() + UNAVAILABLE_TIMEOUT_SECONDS
    while True:
        try:
            return await api.call(method, path, body=body)
        except ApiError as error:
            is_unavailable = error.status in (NO_RESPONSE, TOO_MANY_REQUESTS) or error.status >= 500
            if not is_unavailable or time.monotonic() > deadline:
                raise
            await asyncio.sleep(RETRY_INTERVAL_SECONDS)


async def create(api: ApiClient, path: ApiPath, body: RawBody) -> RawBody:
    """Create an object, or return the one that an earlier request without a response has created."""
    try:
        return await call(api, "POST", path, body=body)
    except ApiError as error:
        if error.status != CONFLICT:
            raise
        return await call(api, "GET", extend_path(path, body["metadata"]["name"]))


async def delete(api: ApiClient, path: ApiPath, **options: object) -> bool:
    """Delete an object; return False if it does not exist."""
    body: RawBody = {"kind": "DeleteOptions", "apiVersion": "v1", **options}
    try:
        await call(api, "DELETE", path, body=body)
    except ApiError as error:
        if error.status == NOT_FOUND:
            return False
        raise
    return True


async def update(api: ApiClient, path: ApiPath, change: Callable[[RawBody], RawBody]) -> bool:
    """Read an object and replace it by the changed one, again after a conflict; return False if it does not exist."""
    while True:
        try:
            await call(api, "PUT", path, body=change(await call(api, "GET", path)))
            return True
        except ApiError as error:
            if error.status == NOT_FOUND:
                return False
            if error.status != CONFLICT:
                raise
            await asyncio.sleep(0.1)
