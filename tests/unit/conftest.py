"""Settings of the unit tests: one thread per computation, and HTTP servers that stop at once."""

import os
import socketserver
from collections.abc import Iterator

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")  # torch reads it once; the models are too small for several threads


@pytest.fixture(scope="session", autouse=True)
def _stop_servers_at_once() -> Iterator[None]:
    """Let HTTP servers notice their shutdown within 10 ms instead of 500 ms."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socketserver.BaseServer.serve_forever, "__defaults__", (0.01,))
        yield
