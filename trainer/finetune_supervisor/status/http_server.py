"""/status (JSON) and /metrics (Prometheus) of one node, for the operator, people and scrapers."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import TCPServer

from finetune_supervisor.contract import Node
from finetune_supervisor.liveness.heartbeat import Heartbeat, progress_object
from finetune_supervisor.status.progress_reports import LARGEST_REPORT, PATH, Reports


@dataclass(frozen=True)
class Snapshot:
    """What the node can tell at this moment."""

    phase: str
    outcome: str
    heartbeats: tuple[Heartbeat, ...]


def render_status(node: Node, seen: Snapshot, *, now: float) -> dict[str, object]:
    first = seen.heartbeats[0] if seen.heartbeats else None
    return {
        "version": 1,
        "namespace": node.namespace,
        "job": node.job,
        "phase": seen.phase,
        "outcome": seen.outcome,
        "nodeRank": node.node_rank,
        "attempt": node.attempt,
        "worldSize": node.world_size,
        "firstStep": first.first_step if first else None,
        "progress": progress_object(first) if first else None,
        "ranks": [
            {
                "rank": beat.rank,
                "localRank": beat.local_rank,
                "pid": beat.pid,
                "phase": beat.phase,
                "step": beat.progress.step,
                "heartbeatAgeSeconds": round(max(0.0, now - beat.time), 3),
                "peakMemoryBytes": beat.peak_memory_bytes,
                "ownStepSeconds": beat.own_step_seconds,
            }
            for beat in seen.heartbeats
        ],
    }


def render_metrics(node: Node, seen: Snapshot, *, now: float) -> str:
    """Prometheus text. Progress is given by node rank 0 alone: the others know the same numbers."""
    samples = list(_rank_samples(seen, now=now))
    if node.node_rank == 0 and seen.heartbeats:
        samples += _progress_samples(seen.heartbeats[0])
    common = f'namespace="{node.namespace}",job="{node.job}",attempt="{node.attempt}",node_rank="{node.node_rank}"'
    lines = []
    described = set()
    for name, help_text, labels, value in samples:
        if name not in described:
            described.add(name)
            lines += [f"# HELP {name} {help_text}", f"# TYPE {name} gauge"]
        lines.append(f"{name}{{{common}{labels}}} {value}")
    return "\n".join(lines) + "\n"


_Sample = tuple[str, str, str, float]


def _rank_samples(seen: Snapshot, *, now: float) -> Iterator[_Sample]:
    for beat in seen.heartbeats:
        labels = f',rank="{beat.rank}"'
        age = max(0.0, now - beat.time)
        yield "finetune_rank_heartbeat_age_seconds", "Seconds since the rank last showed progress.", labels, age
    for beat in seen.heartbeats:
        if beat.peak_memory_bytes is not None:
            name, labels = "finetune_rank_peak_memory_bytes", f',rank="{beat.rank}"'
            yield name, "Most memory the rank held: GPU, or resident set.", labels, beat.peak_memory_bytes
    for beat in seen.heartbeats:
        if beat.own_step_seconds is not None:
            name, labels = "finetune_rank_own_step_seconds", f',rank="{beat.rank}"'
            yield name, "Seconds of a step in which the rank waits for no other.", labels, beat.own_step_seconds


def _progress_samples(beat: Heartbeat) -> Iterator[_Sample]:
    progress = beat.progress
    forecast = progress.memory.forecast if progress.memory else None
    values = (
        ("finetune_step", "Optimizer steps done.", progress.step),
        ("finetune_total_steps", "Optimizer steps in all.", progress.total_steps),
        ("finetune_epoch", "Passes over the rows.", progress.epoch),
        ("finetune_loss", "Training loss of the last report.", progress.loss),
        ("finetune_eval_loss", "Last evaluation loss.", progress.eval_loss),
        ("finetune_learning_rate", "Learning rate of the last step.", progress.learning_rate),
        ("finetune_grad_norm", "Gradient norm of the last step.", progress.grad_norm),
        ("finetune_tokens_per_second", "Tokens of all ranks per second.", progress.tokens_per_second),
        ("finetune_samples_per_second", "Samples of all ranks per second.", progress.samples_per_second),
        ("finetune_step_seconds", "Seconds of a step, without evaluation and checkpoints.", progress.step_seconds),
        ("finetune_mfu", "Model FLOPs utilisation, from 0 to 1.", progress.mfu),
        ("finetune_data_wait_share", "Share of a step spent waiting for data.", progress.data_wait_share),
        ("finetune_memory_forecast_bytes", "Memory that a rank was forecast to need.", forecast),
        ("finetune_eta_seconds", "Seconds to the last step at the present pace.", progress.eta_seconds),
    )
    for name, help_text, value in values:
        if value is not None:
            yield name, help_text, "", value


class _Server(ThreadingHTTPServer):
    def server_bind(self) -> None:
        """Without the base class's question to DNS for our own name, which may take long in a new pod."""
        if self.address_family == socket.AF_INET6:
            self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        TCPServer.server_bind(self)


class _DualStackServer(_Server):
    """On `::`, which takes IPv4 as well."""

    address_family = socket.AF_INET6


def _bind(port: int, handler: type[BaseHTTPRequestHandler]) -> ThreadingHTTPServer:
    try:
        return _DualStackServer(("::", port), handler)
    except OSError:  # no IPv6 here; a port that is taken fails once more
        return _Server(("", port), handler)


def _take_report(request: BaseHTTPRequestHandler, reports: Reports | None) -> tuple[int, str, str]:
    """Code, content type and body of the answer to a POST."""
    kind = "text/plain"
    if reports is None or request.path != PATH:
        return 404, kind, "nothing is taken here\n"
    if not reports.is_ours(request.headers.get("Authorization", "")):
        return 401, kind, "the token is not this node's\n"
    length = request.headers.get("Content-Length", "")
    if not length.isdigit() or int(length) > LARGEST_REPORT:
        return 413, kind, f"expected a Content-Length of at most {LARGEST_REPORT} bytes\n"
    if not reports.take(request.rfile.read(int(length))):
        return 400, kind, "expected {trainerStatus: {metrics: [{name, value}], ...}}\n"
    return 200, kind, ""


def serve(node: Node, snapshot: Callable[[], Snapshot], *, reports: Reports | None = None) -> ThreadingHTTPServer:
    """Answer in the background, on all interfaces: the operator asks by pod IP. Raises OSError if the port is taken."""

    class Handler(BaseHTTPRequestHandler):
        server_version = "finetune"
        timeout = 10.0

        def do_GET(self) -> None:
            if self.path == "/status":
                body = json.dumps(render_status(node, snapshot(), now=time.time()))
                self._answer(200, "application/json", body)
            elif self.path == "/metrics":
                body = render_metrics(node, snapshot(), now=time.time())
                self._answer(200, "text/plain; version=0.0.4", body)
            else:
                self._answer(404, "text/plain", "there are /status and /metrics\n")

        def do_POST(self) -> None:
            self._answer(*_take_report(self, reports))

        def _answer(self, code: int, content_type: str, body: str) -> None:
            data = body.encode()
            self.send_response(code)
            self.send_header("Content-Type", content_type)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002
            """One line per scrape would bury the training log."""

    server = _bind(node.status_port, Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server
