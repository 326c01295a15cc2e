"""An ApiServer that talks to an HttpApi on loopback."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp

from finetune_operator.kube.api_client import ApiServer
from finetune_operator.kube.credentials import Access, open_session
from testing.fakes.http_api import HttpApi, serving


@asynccontextmanager
async def connected(api: HttpApi, *middlewares: aiohttp.ClientMiddlewareType) -> AsyncIterator[ApiServer]:
    """The real client code, with a session of the operator's own making."""
    async with serving(api) as url:
        access = Access(server=url)
        async with open_session(access, connections=10, middlewares=middlewares) as session:
            yield ApiServer(url, calls=session, streams=session)
