"""Errors of requests to the Hub, of stores and of ports, with servers on this machine only."""

import datetime
import http.server
import socket
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import requests
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from testing.corpus.provoke.hub_server import FailingHub
from testing.fakes.http_server import serve_in_background
from testing.processes.supervisors import find_free_port


def _use_hub(call: Callable[[str], object]) -> Callable[[Path], None]:
    """Return a provocation that calls a function with the URL of a failing server."""

    def provoke(folder: Path) -> None:
        with serve_in_background(FailingHub) as url:
            call(url)

    return provoke


def _use_closed_port(call: Callable[[str], object]) -> Callable[[Path], object]:
    """Return a provocation that calls a function with a URL on which nothing listens."""
    return lambda folder: call(f"http://127.0.0.1:{find_free_port()}")


def _describe(url: str, model: str, **settings: Any) -> None:
    huggingface_hub.HfApi(endpoint=url, token=False).model_info(f"acme/{model}", **settings)


def _snapshot(url: str, model: str) -> None:
    huggingface_hub.snapshot_download(f"acme/{model}", endpoint=url, cache_dir="cache", token=False)


def _download(url: str, model: str, filename: str = "config.json", revision: str = "main") -> None:
    huggingface_hub.hf_hub_download(
        f"acme/{model}", filename, revision=revision, endpoint=url, cache_dir="cache", token=False
    )


def _fetch(url: str) -> None:
    requests.get(url, timeout=1).raise_for_status()


def _wait_for_missing_key(folder: Path) -> None:
    store = TCPStore("127.0.0.1", find_free_port(), world_size=1, is_master=True)
    store.wait(["rank1/ready"], datetime.timedelta(seconds=1))


def _listen_on_taken_port(folder: Path) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        http.server.HTTPServer(listener.getsockname(), http.server.BaseHTTPRequestHandler)


PROVOCATIONS: dict[str, Callable[[Path], object]] = {
    "server answers 401 to snapshot_download": _use_hub(lambda url: _snapshot(url, "m-401")),
    "503 on snapshot_download": _use_hub(lambda url: _snapshot(url, "m-503")),
    "500 on model_info": _use_hub(lambda url: _describe(url, "m-500")),
    "429 on model_info": _use_hub(lambda url: _describe(url, "m-429")),
    "never answering on model_info with a time limit": _use_hub(lambda url: _describe(url, "m-hang", timeout=1)),
    "connection closed without answer": _use_hub(lambda url: _describe(url, "m-empty")),
    "connection reset on model_info": _use_hub(lambda url: _describe(url, "m-reset")),
    "gated repo (403) file download": _use_hub(lambda url: _download(url, "m-gated3")),
    "model name that the Hub does not have": _use_hub(lambda url: _snapshot(url, "m-404")),
    "file that the repo does not have": _use_hub(lambda url: _download(url, "m-ent", "pytorch_model.bin")),
    "revision that the Hub does not have": _use_hub(lambda url: _download(url, "m-rev", revision="v9")),
    "Hub port closed, model_info": _use_closed_port(lambda url: _describe(url, "x")),
    "Hub port closed, snapshot_download": _use_closed_port(lambda url: _snapshot(url, "x")),
    "502 from own weight download": _use_hub(lambda url: _fetch(f"{url}/m-502")),
    "weights fetched by own code with expired token": _use_hub(
        lambda url: _fetch(f"{url}/acme/m-401/resolve/main/model.safetensors")
    ),
    "server never answers": _use_hub(lambda url: _fetch(f"{url}/m-hang")),
    "download cut in the middle": _use_hub(lambda url: _fetch(f"{url}/m-cut")),
    "connection reset": _use_hub(lambda url: _fetch(f"{url}/m-reset")),
    "Hub port closed": _use_closed_port(lambda url: _fetch(f"{url}/acme/x/resolve/main/config.json")),
    "503 through urllib": _use_hub(lambda url: urllib.request.urlopen(f"{url}/m-503")),  # noqa: S310
    "store.wait for a key the peer never sets": _wait_for_missing_key,
    "own metrics endpoint on a taken port": _listen_on_taken_port,
}
