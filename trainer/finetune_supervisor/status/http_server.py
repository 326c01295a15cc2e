"""HTTP server of a node, which serves /status and /metrics and receives progress reports of user commands."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from http.server import BaseHTTPRequestHandler

from finetune_supervisor.contract import Node
from finetune_supervisor.liveness.heartbeat import Heartbeat, to_status_progress
from finetune_supervisor.messages import Degradation, to_json_object
from finetune_supervisor.status.bounded_server import BoundedRequestHandler, BoundedServer, bind_server
from finetune_supervisor.status.progress_reports import MAX_REPORT_BYTES, REPORT_PATH, ProgressReports


@dataclass(frozen=True)
class NodeSnapshot:
    """State of the node at the time of a request."""

    phase: str
    outcome: str
    heartbeats: tuple[Heartbeat, ...]
    degraded: tuple[Degradation, ...] = ()


def render_status(node: Node, snapshot: NodeSnapshot, *, now: float) -> dict[str, object]:
    """Return the JSON body of /status; `now` is in seconds since the epoch."""
    first_heartbeat = snapshot.heartbeats[0] if snapshot.heartbeats else None
    return {
        "version": 1,
        "namespace": node.namespace,
        "job": node.job,
        "uid": node.uid,
        "phase": snapshot.phase,
        "outcome": snapshot.outcome,
        "nodeRank": node.node_rank,
        "attempt": node.attempt,
        "worldSize": node.world_size,
        "firstStep": first_heartbeat.first_step if first_heartbeat else None,
        "progress": to_json_object(to_status_progress(first_heartbeat)) if first_heartbeat else None,
        "degraded": [asdict(degradation) for degradation in snapshot.degraded],
        "ranks": [
            {
                "rank": heartbeat.rank,
                "localRank": heartbeat.local_rank,
                "pid": heartbeat.pid,
                "phase": heartbeat.phase,
                "step": heartbeat.progress.step,
                "heartbeatAgeSeconds": round(max(0.0, now - heartbeat.time), 3),
                "peakMemoryBytes": heartbeat.peak_memory_bytes,
                "ownStepSeconds": heartbeat.own_step_seconds,
            }
            for heartbeat in snapshot.heartbeats
        ],
    }


def render_metrics(node: Node, snapshot: NodeSnapshot, *, now: float) -> str:
    """Return the body of /metrics in the Prometheus text format.

    Only node rank 0 exports the training progress, which is equal on all nodes.
    """
    samples = list(_build_rank_samples(snapshot, now=now))
    if node.node_rank == 0 and snapshot.heartbeats:
        samples += _build_progress_samples(snapshot.heartbeats[0])
    for degradation in snapshot.degraded:
        reason_label = f',reason="{degradation.reason}"'
        samples.append(("finetune_degraded", "1 for each circumstance that slows the job down.", reason_label, 1))
    common_labels = (
        f'namespace="{node.namespace}",job="{node.job}",attempt="{node.attempt}",node_rank="{node.node_rank}"'
    )
    lines = []
    described_metrics = set()
    for name, help_text, labels, value in samples:
        if name not in described_metrics:
            described_metrics.add(name)
            lines += [f"# HELP {name} {help_text}", f"# TYPE {name} gauge"]
        lines.append(f"{name}{{{common_labels}{labels}}} {value}")
    return "\n".join(lines) + "\n"


_MetricSample = tuple[str, str, str, float]


def _build_rank_samples(snapshot: NodeSnapshot, *, now: float) -> Iterator[_MetricSample]:
    for heartbeat in snapshot.heartbeats:
        labels = f',rank="{heartbeat.rank}"'
        age = max(0.0, now - heartbeat.time)
        yield "finetune_rank_heartbeat_age_seconds", "Seconds since the rank last showed progress.", labels, age
    for heartbeat in snapshot.heartbeats:
        if heartbeat.peak_memory_bytes is not None:
            name, labels = "finetune_rank_peak_memory_bytes", f',rank="{heartbeat.rank}"'
            yield (
                name,
                "Peak memory of the rank: GPU memory, or resident set size without a GPU.",
                labels,
                heartbeat.peak_memory_bytes,
            )
    for heartbeat in snapshot.heartbeats:
        if heartbeat.own_step_seconds is not None:
            name, labels = "finetune_rank_own_step_seconds", f',rank="{heartbeat.rank}"'
            yield (
                name,
                "Seconds of a step in which the rank does not wait for other ranks.",
                labels,
                heartbeat.own_step_seconds,
            )


def _build_progress_samples(heartbeat: Heartbeat) -> Iterator[_MetricSample]:
    progress = heartbeat.progress
    forecast = progress.memory.forecast if progress.memory else None
    all_reduce_gbps = progress.network.all_reduce_gbps if progress.network else None
    values = (
        ("finetune_step", "Completed optimizer steps.", progress.step),
        ("finetune_total_steps", "Planned optimizer steps.", progress.total_steps),
        ("finetune_epoch", "Completed epochs, with fraction.", progress.epoch),
        ("finetune_loss", "Last reported training loss.", progress.loss),
        ("finetune_eval_loss", "Loss of the last evaluation.", progress.eval_loss),
        ("finetune_learning_rate", "Learning rate of the last step.", progress.learning_rate),
        ("finetune_grad_norm", "Gradient norm of the last step.", progress.grad_norm),
        ("finetune_tokens_per_second", "Tokens per second of all ranks.", progress.tokens_per_second),
        ("finetune_samples_per_second", "Samples per second of all ranks.", progress.samples_per_second),
        (
            "finetune_step_seconds",
            "Seconds per optimizer step, without evaluation and checkpoints.",
            progress.step_seconds,
        ),
        ("finetune_mfu", "Model FLOPs utilization, 0 to 1.", progress.mfu),
        (
            "finetune_tokens_per_second_per_rank",
            "Tokens per second divided by the number of ranks.",
            progress.tokens_per_second_per_rank,
        ),
        ("finetune_scaling_efficiency", "Estimated share of a step without waits.", progress.scaling_efficiency),
        ("finetune_gpu_utilization", "Mean share of time in which the GPUs run a kernel.", progress.gpu_utilization),
        ("finetune_all_reduce_gbps", "Bus bandwidth of an all-reduce over all ranks in Gbit/s.", all_reduce_gbps),
        ("finetune_data_wait_share", "Fraction of a step spent waiting for the next batch.", progress.data_wait_share),
        ("finetune_memory_forecast_bytes", "Forecast of the peak memory of a rank.", forecast),
        ("finetune_eta_seconds", "Estimated seconds until the last step.", progress.eta_seconds),
    )
    for name, help_text, value in values:
        if value is not None:
            yield name, help_text, "", value


def _handle_report(request: BaseHTTPRequestHandler, reports: ProgressReports | None) -> tuple[int, str, str]:
    """Record a posted progress report and return status code, content type and body of the response."""
    content_type = "text/plain"
    if reports is None or request.path != REPORT_PATH:
        return 404, content_type, "progress reports are not accepted here\n"
    if not reports.is_authorized(request.headers.get("Authorization", "")):
        return 401, content_type, "expected the bearer token of this node\n"
    length = request.headers.get("Content-Length", "")
    if not length.isdigit() or int(length) > MAX_REPORT_BYTES:
        return 413, content_type, f"expected a Content-Length of at most {MAX_REPORT_BYTES} bytes\n"
    if not reports.record_report(request.rfile.read(int(length))):
        return 400, content_type, "expected {trainerStatus: {metrics: [{name, value}], ...}}\n"
    return 200, content_type, ""


def start_status_server(
    node: Node, snapshot: Callable[[], NodeSnapshot], *, reports: ProgressReports | None = None
) -> BoundedServer:
    """Start the server in a background thread, in a pod on all interfaces because the operator polls the pod IP.

    Raises: OSError if the port is in use.
    """

    class Handler(BoundedRequestHandler):
        server_version = "finetune"

        def do_GET(self) -> None:  # noqa: N802  http.server requires this name
            if self.path == "/status":
                body = json.dumps(render_status(node, snapshot(), now=time.time()))
                self._respond(200, "application/json", body)
            elif self.path == "/metrics":
                body = render_metrics(node, snapshot(), now=time.time())
                self._respond(200, "text/plain; version=0.0.4", body)
            else:
                self._respond(404, "text/plain", "available paths: /status, /metrics\n")

        def do_POST(self) -> None:  # noqa: N802  http.server requires this name
            self._respond(*_handle_report(self, reports))

        def _respond(self, code: int, content_type: str, body: str) -> None:
            data = body.encode()
            self.send_response(code)
            self.send_header("Content-Type", content_type)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    server = bind_server(node.status_host, node.status_port, Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server
