"""Runs a Prometheus server that scrapes one target, and queries it."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import yaml

START_TIMEOUT_SECONDS = 60.0
SCRAPES = 3  # rates need at least two samples


@dataclass(frozen=True)
class PrometheusServer:
    """A running Prometheus server."""

    session: aiohttp.ClientSession
    url: str

    async def query(self, expr: str) -> list[Any]:
        """Return the result of an instant query.

        Raises: ValueError with the message of the server if the expression is invalid.
        """
        async with self.session.get(f"{self.url}/api/v1/query", params={"query": expr}) as response:
            body = await response.json()
        if body["status"] != "success":
            raise ValueError(f"{expr}: {body['error']}")
        result: list[Any] = body["data"]["result"]
        return result

    async def wait_for_scrapes(self, metric: str) -> None:
        """Wait until the metric was scraped several times."""
        async with asyncio.timeout(START_TIMEOUT_SECONDS):
            while not await self._count_scrapes(metric) >= SCRAPES:  # noqa: ASYNC110
                await asyncio.sleep(0.2)

    async def _count_scrapes(self, metric: str) -> int:
        try:
            result = await self.query(f"count_over_time({metric}[1h])")
        except (aiohttp.ClientError, ValueError):  # the server is starting
            return 0
        return int(result[0]["value"][1]) if result else 0


@asynccontextmanager
async def run_prometheus(program: Path, folder: Path, *, target: str) -> AsyncIterator[PrometheusServer]:
    """Run a server that scrapes `target` (host:port) twice per second, with its data in the folder."""
    with socket.create_server(("127.0.0.1", 0)) as free_socket:
        port = free_socket.getsockname()[1]
    scrape = {"job_name": "operator", "honor_labels": True, "static_configs": [{"targets": [target]}]}
    config = {"global": {"scrape_interval": "500ms"}, "scrape_configs": [scrape]}
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    process = await asyncio.create_subprocess_exec(
        *(program, f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"),
        *(f"--web.listen-address=127.0.0.1:{port}", "--log.level=error"),
    )
    try:
        async with aiohttp.ClientSession() as session:
            yield PrometheusServer(session, f"http://127.0.0.1:{port}")
    finally:
        process.kill()
        await process.wait()
