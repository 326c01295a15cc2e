"""Connect the operator's API client to a fake API server on the loopback interface."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp

from finetune_operator.kube.api_client import ApiClient
from finetune_operator.kube.credentials import ClusterCredentials, open_session
from testing.fakes.http_api import HttpApi, serve_api


@asynccontextmanager
async def serve_and_connect(api: HttpApi, *middlewares: aiohttp.ClientMiddlewareType) -> AsyncIterator[ApiClient]:
    """Serve an HttpApi and yield an API client of the operator that is connected to it."""
    async with serve_api(api) as url:
        access = ClusterCredentials(server=url)
        async with open_session(access, connections=10, middlewares=middlewares) as session:
            yield ApiClient(url, request_session=session, watch_session=session)
